import pytest
from matplotlib.image import imread

from hybridflow.errors import DataError
from hybridflow.runtime.observe import plot_curves
from hybridflow.runtime.observe.plot import smoothed


def test_smoothing_is_the_mean_of_the_last_points():
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert smoothed([1.0, 3.0], 10) == [1.0, 2.0]
    assert smoothed([1.0, 3.0], 1) == [1.0, 3.0]


def test_plot_shows_every_curve_that_has_values(tmp_path):
    rows = [{"step": i, "reward": i / 20, "val": i / 10 if i % 5 == 0 else None} for i in range(20)]
    orange = []
    for names in (["reward", "val"], ["reward", "absent"]):
        plot_curves(rows, names, tmp_path / "plots" / "curve.png", title="countdown")
        image = imread(tmp_path / "plots" / "curve.png")
        assert image.shape[:2] == (540, 960)
        orange.append((abs(image[..., :3] - [1.0, 0.498, 0.055]) < 0.02).all(-1).sum())
    assert (orange[0] > 100, orange[1]) == (True, 0)
    with pytest.raises(DataError, match=r"nothing to plot: reward, val not found in the 1 row"):
        plot_curves([{"step": 1, "x": 2}], ["reward", "val"], tmp_path / "curve.png")
