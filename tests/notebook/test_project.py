"""The person's own modules: which they are, and how they travel."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from firepool_nb.capture import project as project_module
from firepool_nb.capture.cell import capture
from firepool_nb.capture.project import Package, ProjectModules, ProjectTooLarge


@pytest.fixture
def notebook_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("fp_"):
            del sys.modules[name]


def names(package: Package | None) -> list[str]:
    assert package is not None
    return zipfile.ZipFile(io.BytesIO(package.data)).namelist()


def test_a_module_beside_the_notebook_travels_with_what_it_imports(notebook_folder: Path) -> None:
    (notebook_folder / "fp_helper.py").write_text("import json\nimport fp_other\n")
    (notebook_folder / "fp_other.py").write_text("from fp_pkg.part import f\n")
    (notebook_folder / "fp_unused.py").write_text("")
    package_folder = notebook_folder / "fp_pkg"
    (package_folder / "__pycache__").mkdir(parents=True)
    (package_folder / "__init__.py").write_text("")
    (package_folder / "part.py").write_text("def f(): return 1\n")
    (package_folder / "data.txt").write_text("data")
    (package_folder / "__pycache__" / "part.pyc").write_text("")
    package = ProjectModules().package(["fp_helper", "json", "numpy.linalg"])
    assert names(package) == [
        "fp_helper.py", "fp_other.py", "fp_pkg/__init__.py", "fp_pkg/data.txt", "fp_pkg/part.py",
    ]  # fmt: skip


def test_it_is_read_from_the_disk_as_it_is_now(notebook_folder: Path) -> None:
    module = notebook_folder / "fp_now.py"
    module.write_text("x = 1\n")
    modules = ProjectModules()
    first = modules.package(["fp_now"])
    again = modules.package(["fp_now"])
    assert first is again
    module.write_text("x = 22\n")
    changed = modules.package(["fp_now"])
    assert changed is not None
    assert first is not None
    assert changed.sha256 != first.sha256
    module.write_text("x = 1\n")
    restored = ProjectModules().package(["fp_now"])
    assert restored is not None
    assert restored.sha256 == first.sha256, "contents alone decide"


def test_installed_packages_and_our_own_do_not_travel() -> None:
    assert ProjectModules().package(["numpy", "json", "sys", "firepool_nb", "no_such_one"]) is None


def test_functions_and_instances_take_their_modules_along(notebook_folder: Path) -> None:
    (notebook_folder / "fp_shapes.py").write_text("class Box:\n    pass\ndef area(b): return 1\n")
    import fp_shapes

    modules = ProjectModules()
    for namespace in ({"v": fp_shapes.area}, {"v": [fp_shapes.Box()]}, {"v": fp_shapes}):
        captured = capture("v", namespace, project=modules)
        assert names(captured.package) == ["fp_shapes.py"]
    captured = capture("from fp_shapes import area\narea(1)", {}, project=modules)
    assert names(captured.package) == ["fp_shapes.py"]
    assert capture("1", {"v": fp_shapes}, project=modules).package is None


def test_a_named_folder_travels_whole(notebook_folder: Path, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    (extra / "sub").mkdir(parents=True)
    (extra / "sub" / "__init__.py").write_text("import fp_beside\n")
    (notebook_folder / "fp_beside.py").write_text("")
    captured = capture("1", {}, project=ProjectModules(), folder=str(extra))
    assert names(captured.package) == ["fp_beside.py", "sub/__init__.py"]


def test_data_inside_a_package_is_refused_by_name(
    notebook_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_module, "LIMIT_BYTES", 1000)
    folder = notebook_folder / "fp_heavy"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "weights.bin").write_bytes(b"x" * 2000)
    with pytest.raises(ProjectTooLarge, match=r"weights\.bin"):
        ProjectModules().package(["fp_heavy"])
