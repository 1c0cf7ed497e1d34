import pytest
from matplotlib.image import imread

from hybridflow.errors import DataError
from hybridflow.observability import plot_curves
from hybridflow.observability.plot import smoothed


def test_smoothing_is_the_mean_of_the_last_points():
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert smoothed([1.0, 3.0], 10) == [1.0, 2.0]
    assert smoothed([1.0, 3.0], 1) == [1.0, 3.0]


def test_plot_shows_every_curve(tmp_path):
    rows = [{"step": i, "reward": i / 20, "val": i / 10 if i % 5 == 0 else None} for i in range(20)]
    plot_curves(rows, ["reward", "val"], tmp_path / "plots" / "both.png", title="countdown")
    plot_curves(rows, ["reward"], tmp_path / "one.png", title="countdown")
    both, one = imread(tmp_path / "plots" / "both.png"), imread(tmp_path / "one.png")
    assert both.shape[:2] == (540, 960)
    orange = (abs(both[..., :3] - [1.0, 0.498, 0.055]) < 0.02).all(-1).sum()
    assert orange > 100
    assert (abs(one[..., :3] - [1.0, 0.498, 0.055]) < 0.02).all(-1).sum() == 0


def test_plot_skips_rows_without_the_key(tmp_path):
    plot_curves([{"step": 0, "val": 0.5}, {"step": 1}], ["val", "reward"], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_plot_without_values_raises_with_the_keys(tmp_path):
    with pytest.raises(DataError, match=r"nothing to plot: reward, val not found in the 1 row"):
        plot_curves([{"step": 1, "x": 2}], ["reward", "val"], tmp_path / "curve.png")
