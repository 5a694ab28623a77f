"""The parts of a launcher: this host, the token's file, the console of the ranks."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from nvrx_slurm.launch import token_file
from nvrx_slurm.launch.rank_console import RankConsole, Shown, parse_ranks, parse_std
from nvrx_slurm.launch.this_host import bind_address, claim_hosting, claim_node_name, is_this_host
from nvrx_slurm.launch.token_file import TokenFileError, read_or_create_token, read_token, wait_for_token

TOKEN = "x" * 43

# --- this host ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.53", "::1", socket.gethostname()])
def test_names_and_addresses_of_this_machine_are_known(host: str) -> None:
    assert is_this_host(host)


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::1", "no-such-host.invalid", ""])
def test_others_are_not_this_machine(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    assert not is_this_host(host)


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.7", "127.0.0.7"),
        ("::1", "::1"),
        ("192.0.2.7", "0.0.0.0"),
        ("2001:db8::1", "::"),
        ("no-such-host.invalid", "0.0.0.0"),
    ],
)
def test_only_a_loopback_address_is_listened_on_alone(host: str, bound: str) -> None:
    assert bind_address(host) == bound


def test_one_launcher_coordinates_on_a_port_until_it_lets_go() -> None:
    port = os.getpid()
    held = claim_hosting(port)
    assert held is not None
    assert claim_hosting(port) is None
    held.close()
    again = claim_hosting(port)
    assert again is not None
    again.close()


def test_free_ports_are_nobodys() -> None:
    one, other = claim_hosting(0), claim_hosting(0)
    assert one is not None
    assert other is not None
    one.close()
    other.close()


def test_names_of_nodes_are_one_per_launcher_and_job() -> None:
    job = f"job{os.getpid()}"
    names = [claim_node_name("host", job) for _ in range(3)]
    elsewhere, held = claim_node_name("host", f"another{os.getpid()}")
    assert [name for name, _ in names] == ["host", "host-2", "host-3"]
    assert elsewhere == "host"
    # who is started again takes the name that is free
    names[1][1].close()
    again, held_again = claim_node_name("host", job)
    assert again == "host-2"
    for claim in (held, held_again, names[0][1], names[2][1]):
        claim.close()


# --- the token ---------------------------------------------------------------------------------------


def test_the_host_makes_a_token_and_everybody_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    token = read_or_create_token(path)
    assert len(token) >= 32
    assert read_or_create_token(path) == read_token(path) == wait_for_token(path, 0.0) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_of_two_that_make_it_at_once_both_have_the_firsts(tmp_path: Path) -> None:
    path, found, start = tmp_path / "token", [], threading.Barrier(8)

    def make() -> None:
        start.wait()
        found.append(read_or_create_token(path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_it_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "token"
    maker = threading.Timer(0.1, read_or_create_token, [path])
    maker.start()
    token = wait_for_token(path, 30.0)
    maker.join()
    assert token == read_token(path)


def test_one_that_never_comes_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"token did not appear within 0 s: .* must share; --token-file"):
        wait_for_token(tmp_path / "token", 0.0)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_one_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    for read in (read_token, read_or_create_token):
        with pytest.raises(TokenFileError, match=rf"open to others \(mode {mode:04o}\): `chmod 600` it"):
            read(path)


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    monkeypatch.setattr(token_file.os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(TokenFileError, match=r"belongs to uid .*, not to you"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 257, "x" * 20 + " " + "x" * 20, "é" * 40])
def test_what_is_no_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(TokenFileError, match="holds no token"):
        read_token(path)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(TOKEN)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(TokenFileError, match="link"):
        read_token(tmp_path / "link")
    with pytest.raises(TokenFileError, match="is not a regular file"):
        read_token(tmp_path / "pipe")
    with pytest.raises(TokenFileError, match="is not a regular file"):
        read_token(tmp_path)


# --- the console -------------------------------------------------------------------------------------


class Screen:
    def __init__(self, shown: Shown) -> None:
        self.text = b""
        self.console = RankConsole(shown, self._write)

    def _write(self, data: bytes) -> None:
        self.text += data

    def say(self, local_rank: int, data: bytes, rank: int = 7) -> Screen:
        self.console.show(rank, local_rank, data)
        return self


def test_output_is_passed_on_as_it_comes() -> None:
    assert (
        Screen(Shown()).say(0, b"half a").say(1, b"X\n").say(0, b" line\n").say(0, b"").text
        == b"half aX\n line\n"
    )


def test_lines_of_tee_have_a_prefix_and_the_last_is_complete() -> None:
    screen = Screen(Shown(tee=True, redirects=True, role="trainer"))
    screen.say(0, b"a\nb").say(1, b"c\n").say(0, b"d").say(0, b"")
    assert screen.text == b"[trainer0]:a\n[trainer1]:c\n[trainer0]:bd\n"


def test_the_prefix_can_be_ones_own() -> None:
    shown = Shown(tee=True, template="<${role_name} ${rank}/${local_rank} ${other}>")
    assert Screen(shown).say(1, b"x\n", rank=5).text == b"<default 5/1 ${other}>x\n"


def test_who_is_redirected_or_left_out_is_not_shown() -> None:
    assert Screen(Shown(redirects=parse_std("-r", "1:3"))).say(0, b"a").say(1, b"b").text == b"a"
    assert (
        Screen(Shown(tee=parse_std("-t", "1:3"))).say(0, b"a\n").say(1, b"b\n").text == b"a\n[default1]:b\n"
    )
    assert Screen(Shown(only=parse_ranks("1, 2"))).say(0, b"a").say(2, b"c").text == b"c"


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    screen = Screen(Shown(tee=True)).say(0, b"x" * 70_000)
    assert len(screen.text) > 70_000
