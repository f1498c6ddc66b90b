#!/usr/bin/env python3
"""Signals and job control of `memfit run`, as a terminal and a shell see them. Argument 1: the folder with the fake memfit."""
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

FAKE = sys.argv.pop(1)
MEMFIT, PLAIN = FAKE + "/bin/memfit", FAKE + "/programs/plain"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("MEMFIT_") and name != "LD_PRELOAD"}


def wait_until(true, what, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def child_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return int(file.read().split()[0])


def start(*words, **options):
    return subprocess.Popen([MEMFIT, "run", "--quiet", "--", PLAIN, *words], stdout=subprocess.PIPE, env=ENVIRONMENT,
                            text=True, **options)


class Sent(unittest.TestCase):
    """Signals sent by other processes."""

    def check_counted(self, number, send, expected="1"):
        with start("count", str(number), "200", start_new_session=True) as program:
            self.assertEqual(program.stdout.readline(), "ready\n")
            send(program)
            self.assertEqual(program.stdout.readline(), expected + "\n")
            self.assertEqual(program.wait(20), 0)

    def test_a_signal_sent_to_memfit_reaches_the_program_once(self):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN):
            with self.subTest(number=number):
                self.check_counted(int(number), lambda program: program.send_signal(number))

    def test_a_signal_that_the_program_sends_its_parent_does_not_come_back(self):
        with start("parent", str(int(signal.SIGUSR1)), "sleep", "300", "exit", "3") as program:
            self.assertEqual(program.wait(20), 3)  # not caught: coming back it would end the program

    def test_the_programs_death_by_signal_is_memfits(self):
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1):
            with start("raise", str(int(number))) as program:
                self.assertEqual(program.wait(20), -number)

    def test_a_signal_that_was_ignored_before_is_ignored_in_the_program(self):
        ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with start("say", "ready", "sleep", "500", "exit", "5", preexec_fn=ignore) as program:
            self.assertEqual(program.stdout.readline(), "ready\n")
            program.send_signal(signal.SIGHUP)
            self.assertEqual(program.wait(20), 5)

    def test_an_ignored_sigchld_does_not_hide_the_exit_status(self):
        with start("exit", "5", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)) as program:
            self.assertEqual(program.wait(20), 5)

    def test_no_signal_is_blocked_in_the_program(self):
        result = subprocess.run([MEMFIT, "run", "--quiet", "--", "grep", "SigBlk", "/proc/self/status"], env=ENVIRONMENT,
                                capture_output=True, text=True)
        self.assertRegex(result.stdout, r"SigBlk:\s0{16}\n")

    def test_stopping_only_the_program_does_not_stop_memfit(self):
        with start("say", "ready", "sleep", "800", "exit", "4") as program:
            program.stdout.readline()
            child = child_of(program.pid)
            os.kill(child, signal.SIGSTOP)
            wait_until(lambda: state(child) == "T", "the program stops")
            time.sleep(0.2)
            self.assertEqual(state(program.pid), "S")
            os.kill(child, signal.SIGCONT)
            self.assertEqual(program.wait(20), 4)


class Terminal(unittest.TestCase):
    """Keys of a terminal, with an interactive shell between it and memfit."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(self.folder.name)
            environment = dict(ENVIRONMENT, PS1="", TERM="dumb", HISTFILE="")
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
        self.output = ""
        self.type("echo hel''lo\n")
        self.expect("hello")

    def tearDown(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.master)
        self.folder.cleanup()

    def type(self, text):
        os.write(self.master, text.encode())

    def expect(self, pattern, seconds=20):
        end = time.monotonic() + seconds
        while True:
            match = re.search(pattern, self.output)
            if match:
                self.output = self.output[match.end():]
                return match
            if not select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"{pattern!r} does not come; there is {self.output!r}")
            self.output += os.read(self.master, 4096).decode(errors="replace")

    def test_control_c_reaches_the_program_once(self):
        self.type(f"{MEMFIT} run --quiet -- {PLAIN} count 2 300; echo status $?\n")
        self.expect("ready\r\n")
        self.type("\x03")
        self.expect(r"\^C1\r\n")
        self.expect("status 0")

    def test_control_c_ends_a_program_that_does_not_catch_it(self):
        self.type(f"{MEMFIT} run --quiet -- {PLAIN} say go sleep 20000; echo status $?\n")
        self.expect("go\r\n")
        self.type("\x03")
        self.type("echo status $?\n")
        self.expect("status 130")

    def test_control_z_stops_both_and_fg_continues_both(self):
        self.type(f"{MEMFIT} run --quiet -- {PLAIN} say go sleep 1500 exit 6\n")
        self.expect("go\r\n")
        self.type("\x1a")
        self.expect("Stopped")
        self.type("jobs -p\n")
        memfit = int(self.expect(r"\n(\d+)\r\n").group(1))
        self.assertEqual(state(memfit), "T")
        self.assertEqual(state(child_of(memfit)), "T")
        self.type("fg\n")
        wait_until(lambda: state(memfit) != "T", "memfit goes on")
        wait_until(lambda: "status 6" in self.output or self.ask_status(), "the program ends with its own status")

    def ask_status(self):
        self.type("echo status $?\n")
        try:
            self.expect("status 6", 3)
            return True
        except AssertionError:
            return False

    def test_a_program_in_the_background_works_and_one_that_reads_the_terminal_stops(self):
        self.type(f"{MEMFIT} run --quiet -- {PLAIN} cat &\n")
        self.expect(r"\[1\] (\d+)")
        wait_until(self.stopped_job, "the background job stops at the terminal")
        self.type("kill -9 %1; fg\n")

    def stopped_job(self):
        self.type("jobs\n")
        try:
            self.expect("Stopped", 1)
            return True
        except AssertionError:
            return False


if __name__ == "__main__":
    unittest.main(verbosity=2)
