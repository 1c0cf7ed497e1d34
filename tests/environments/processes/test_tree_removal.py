"""Removal of directories that resist: links, missing permissions, deep trees, misleading names."""

import os

from hybridflow.environments.processes.tree_removal import remove_tree


def test_a_tree_with_links_locked_directories_and_depth_is_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    for path in (tree / "a" / "b" / "c", tree / "1-moved" / "x", tree / "2-moved" / "y"):
        path.mkdir(parents=True)
    (tree / "a" / "b" / "c" / "file").touch()
    (tree / "link").symlink_to(outside)
    os.mkfifo(tree / "a" / "fifo")
    deep = os.open(tree, os.O_RDONLY)
    for _ in range(50):
        os.mkdir("deeper" * 40, dir_fd=deep)
        inner = os.open("deeper" * 40, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    (tree / "a" / "b").chmod(0)
    tree.chmod(0)
    remove_tree(str(tree))
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["kept"]


def test_a_link_in_place_of_the_tree_is_removed_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / "tree").symlink_to(outside)
    remove_tree(str(tmp_path / "tree"))
    remove_tree(str(tmp_path / "tree"))
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["kept"]
