import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from replayssm_orch.actors.rank_log import take_log


def test_everything_that_the_process_writes_is_in_its_log(tmp_path):
    code = (
        "import os, sys\n"
        "from replayssm_orch.actors.rank_log import redirect_output\n"
        "path = redirect_output('run-1', 'rank-0')\n"
        "print('from Python'); print('an error', file=sys.stderr)\n"
        "os.write(1, b'from a library\\n')\n"
        "os._exit(9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (9, "")
    (log,) = tmp_path.glob("replayssm-orch-*/run-1/rank-0.log")
    text = log.read_text()
    assert text.startswith("rank-0 of run run-1: pid ")
    assert all(line in text for line in ("from Python", "an error", "from a library"))


def test_a_taken_log_is_gone_with_its_folder_and_cut_to_its_end(tmp_path):
    log = tmp_path / "run-1" / "rank-0.log"
    log.parent.mkdir()
    log.write_bytes(b"0123456789")
    assert take_log(str(log), 4) == b"6789"
    assert not log.parent.exists()
    assert take_log(str(log), 4) == b""


def test_logs_taken_at_once_are_all_whole(tmp_path):
    # Each taker may find the folder removed by another: its own content must not be lost over that.
    for attempt in range(50):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        logs = [folder / f"rank-{rank}.log" for rank in range(8)]
        for log in logs:
            log.write_text(log.name)
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda log: take_log(str(log), 100), logs))
        assert taken == [log.name.encode() for log in logs]
        assert not folder.exists()
