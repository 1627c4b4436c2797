"""Output: floods, odd bytes, displays, and whose line is whose."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil
from firepool_broker import embedded
from firepool_broker.testing import Api
from kernels import Kernel, Ran

Jobs = Callable[[], list[dict[str, Any]]]


def saved(ran: Ran) -> Any:
    """What a front end writes into the file for a cell, read back and validated."""
    cell = nbformat.v4.new_code_cell(
        "", outputs=[nbformat.from_dict(shown) for shown in _storable(ran)]
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    text = nbformat.writes(notebook)
    back = nbformat.reads(text, as_version=4)
    nbformat.validate(back)
    return back.cells[0].outputs


def _storable(ran: Ran) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k != "transient"} for each in ran.outputs]


def replayed(job_id: str) -> Ran:
    """The same rules over the stored events from the first one on."""
    connection = embedded.find()
    assert connection is not None
    shown = Ran()
    with Api(connection) as api:
        for kind, data in api.follow(job_id, start=0):
            if "n" in data:
                shown.take({"msg_type": kind, "content": data})
    return shown


def essence(ran: Ran) -> list[tuple[str, Any]]:
    """What a person sees."""
    return [(each["output_type"], each.get("text") or each.get("data")) for each in ran.outputs]


# -- C02 -----------------------------------------------------------------------------------------

FLOOD = """
import subprocess
subprocess.run(["sh", "-c",
    "i=0; while [ $i -lt 20000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done"], check=True)
import ctypes
ctypes.CDLL(None).puts(b"from C")
ctypes.CDLL(None).fflush(None)
print("done")
"""


def test_a_flood_on_both_streams_arrives_whole(kernel: Kernel) -> None:
    """C02: nobody blocks, nothing is lost or doubled, the broker keeps its size."""
    kernel.remote("1")
    connection = embedded.find()
    assert connection is not None
    broker = psutil.Process(connection.pid)
    before = broker.memory_info().rss
    began = time.monotonic()
    ran = kernel.remote(FLOOD)
    assert time.monotonic() - began < 30
    numbers = range(20_000)
    assert ran.stdout == "".join(f"o{n}\n" for n in numbers) + "from C\ndone\n"
    assert ran.stderr == "".join(f"e{n}\n" for n in numbers)
    assert broker.memory_info().rss - before < 50 << 20


def test_a_flood_above_the_cap_keeps_head_and_tail(
    configure: Callable[..., Path], kernels: Callable[[], Kernel]
) -> None:
    """C02: above the cap the head, the tail and one line with the number of bytes are kept."""
    configure(output={"limit_mib": 1})
    kernel = kernels()
    ran = kernel.remote("for n in range(60_000): print(n, 'x' * 90)\nprint('done')")
    whole = "".join(f"{n} {'x' * 90}\n" for n in range(60_000)) + "done\n"
    assert ran.stdout.startswith(whole[:100_000])
    assert ran.stdout.endswith(whole[-100_000:])
    markers = [text for text in ran.texts if "dropped" in text]
    assert len(markers) == 1, ran.texts
    assert str(len(whole) - len(ran.stdout)) in markers[0].replace(",", "").replace(" ", "")


# -- C04 -----------------------------------------------------------------------------------------

ODD_BYTES = r"""
import os, time
os.write(1, b"\xff\xfeok\n")
e = "\u00e9".encode()
os.write(1, e[:1]); time.sleep(0.5); os.write(1, e[1:] + b"\n")
os.write(1, bytes(range(256)) * 4096)
print("\nend")
"""


def test_bytes_that_are_no_text_stop_nothing(kernel: Kernel) -> None:
    """C04: replaced where they are no text; a split character is one; the file is valid."""
    ran = kernel.remote(ODD_BYTES)
    assert ran.stdout.startswith("\ufffd\ufffdok\n\u00e9\n")
    assert ran.stdout.endswith("\nend\n")
    kept = saved(ran)
    text = "".join(each["text"] for each in kept if each["output_type"] == "stream")
    assert text == ran.stdout
    assert "\0" not in text
    json.loads(json.dumps(text)).encode("utf-8")


# -- C06 -----------------------------------------------------------------------------------------

CLEAR = "from IPython.display import clear_output\n"
CELLS = {
    "kept": CLEAR + 'print("keep"); clear_output(wait=True)',
    "replaced": CLEAR + 'print("gone"); clear_output(wait=True); print("new")',
    "updated": (
        "from IPython.display import display\nh = display('v0', display_id=True)\n"
        "for n in range(1, 21): h.update(f'v{n}')"
    ),
    "plotted": "import matplotlib.pyplot as plt\nplt.plot([0, 1])\nplt.show()",
}


def test_four_final_states_live_saved_and_replayed(kernel: Kernel, jobs: Jobs) -> None:
    """C06: what stays is the same live, in the file, by replay and by ``%firepool result``."""
    seen: dict[str, Ran] = {}
    for name, code in CELLS.items():
        ran = seen[name] = kernel.remote(code)
        job = jobs()[0]["id"]
        assert essence(replayed(job)) == essence(ran), name
        assert essence(kernel.ok(f"%firepool result {job}")) == essence(ran), name
        assert len(saved(ran)) == 1, name
    assert essence(seen["kept"]) == [("stream", "keep\n")]
    assert essence(seen["replaced"]) == [("stream", "new\n")]
    assert essence(seen["updated"]) == [("display_data", {"text/plain": "'v20'"})]
    assert saved(seen["updated"])[0]["data"] == {"text/plain": "'v20'"}
    ((kind, picture),) = essence(seen["plotted"])
    assert kind == "display_data"
    assert picture["image/png"]


def test_two_runs_of_one_display_do_not_update_each_other(kernel: Kernel) -> None:
    """C06: the second run's updates do not reach the first one's output."""
    slow = CELLS["updated"].replace("h.update", "__import__('time').sleep(0.02); h.update")
    first = kernel.remote(CELLS["updated"])
    shown = set(first.displays)
    request = kernel.start("%%firepool\n" + slow.replace("f'v{n}'", "f'w{n}'"))
    second = kernel.finish(
        request, watch=lambda _ran, message: first.take(message) if _is_update(message) else None
    )
    assert first.texts == ["'v20'"]
    assert second.texts == ["'w20'"]
    assert not shown & second.displays.keys()


def _is_update(message: dict[str, Any]) -> bool:
    return bool(message["msg_type"] == "update_display_data")


# -- C08 -----------------------------------------------------------------------------------------

LATE = (
    "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(2), print('A-late')), daemon={}).start()\n"
    "print('A-main')"
)


def of_cell(kernel: Kernel, code: str, cell_id: str) -> Ran:
    """Run a cell as a front end that names its cells."""
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True}
    message = kernel.client.session.msg("execute_request", content, metadata={"cellId": cell_id})
    kernel.client.shell_channel.send(message)
    ran = kernel.finish(message["header"]["msg_id"])
    assert ran.status == "ok", ran.reply
    return ran


def test_two_running_cells_of_one_id_never_mix(kernel: Kernel, jobs: Jobs) -> None:
    """C08: two jobs of a copied cell run at once; each line is where it belongs."""
    kernel.remote("1")
    shown = [of_cell(kernel, f"%%firepool -a --job a\n{LATE.format(False)}", "copied")]
    time.sleep(0.5)
    b = "import time\ntime.sleep(3); print('B'); 1/0"
    shown.append(of_cell(kernel, f"%%firepool -a --job b\n{b}", "copied"))
    both = [job for job in jobs() if (job["cell"] or {}).get("cell_id") == "copied"]
    assert len({job["id"] for job in both}) == 2
    during = kernel.ok("(a.running(), b.logs(), a.logs())").texts[0]
    assert during in ("(True, '', 'A-main\\n')", "(True, '', 'A-main\\nA-late\\n')")
    kernel.ok("a.wait(30), b.wait(30)")
    a_views = {job["name"] or job["id"]: job for job in jobs()[:2]}
    first, second = sorted(a_views.values(), key=lambda job: job["times"]["submitted"])
    assert second["times"]["first_instruction"] < first["times"]["ended"], "they ran at once"
    assert first["times"]["ended"] - first["times"]["first_instruction"] >= 2
    one = kernel.ok("%firepool result a")
    assert essence(one) == [("stream", "A-main\nA-late\n")]
    two = kernel.run("%firepool result b")
    assert two.stdout == "B\n"
    assert two.error["ename"] == "ZeroDivisionError"
    for cell in shown:
        assert "A-" not in cell.stdout + cell.stderr
        assert "B" not in cell.stdout + cell.stderr
        assert [each["output_type"] for each in cell.outputs] == ["execute_result"]


def test_a_daemon_thread_ends_with_its_cell(kernel: Kernel, jobs: Jobs) -> None:
    """C08: nobody waits for a daemon thread, and nothing of it is seen later."""
    ran = kernel.remote(LATE.format(True))
    assert ran.stdout == "A-main\n"
    times = jobs()[0]["times"]
    assert times["ended"] - times["first_instruction"] < 1.5
    time.sleep(2.2)
    assert kernel.remote("print('next')").stdout == "next\n"
    assert essence(replayed(jobs()[1]["id"])) == [("stream", "A-main\n")]
