"""Make a single file of the agent: ``python -m firepool_podagent.build firepool-podagent.pyz``.

Any Python from 3.10 on runs it: ``python -I -S firepool-podagent.pyz --config-fd 3``. It unpacks
what session interpreters have to read into the pod's directory when it starts.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)
_START = b"""\
import runpy

runpy.run_module("firepool_podagent", run_name="__main__", alter_sys=True)
"""


def build(target: Path) -> None:
    """Write the archive; the same sources give the same bytes.

    Parameters
    ----------
    target : Path
        The file to write.
    """
    package = Path(__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), _START)
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package.parent).as_posix()
            information = zipfile.ZipInfo(name, _EPOCH)
            information.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(information, path.read_bytes())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m firepool_podagent.build FILE")
    build(Path(sys.argv[1]))
