"""Programs of ranks, and options, that several tests of jobs share."""

from __future__ import annotations

from harness import RANK

COLD = ("--warm-start", "off")
QUICK_STOP = ("--workers-stop-timeout", "300ms")
STAY_AWAY = ("--rejoin-timeout", "0")

TRAINS = (
    RANK
    + """
from nvrx_slurm.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
for step in range(3):
    client.send_heartbeat(step=step)
"""
)
"""With three steps and a heartbeat after each."""

BREEDS = (
    RANK
    + """
def spawn(*how):
    subprocess.Popen([sys.executable, "-c", *how], stdin=subprocess.DEVNULL)

sleeper = "import time; time.sleep(600)"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
daemon = f"import os, time; os.setsid(); os.fork() and os._exit(0); os.fork() and os._exit(0); {deaf}"
spawn(sleeper)
spawn(deaf)
spawn(daemon)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
)
"""With children that are hard to end."""

WAITS = (
    RANK
    + """
write(f"ready{rank}.{cycle}")
while True:
    time.sleep(60)
"""
)
"""Until it is ended."""
