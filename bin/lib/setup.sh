# shellcheck shell=bash
# What bin/nvrx-test and bin/nvrx-quickstart have in common: from a clean clone on a fresh Debian 12 or 13
# to a .venv with this package in it. Sourced. `set_up` does it all; where nothing is missing, in a moment.
#
# Who does what: Debian packages and the test cluster need root, and get it from sudo when the caller is
# not root. All else runs as the person at the terminal, also under `sudo bin/nvrx-test`, and
# `give_back_files` hands back what root left in the clone. So nobody's clone fills with root's files.

set -euo pipefail

program=$(basename -- "$0")
clone=$(readlink -f -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
venv=$clone/.venv
stamp=$venv/.nvrx-setup
policy_file=/usr/sbin/policy-rc.d
systemd_mark=/run/systemd/system # exists where systemd runs
# procps (ps, pkill): part of every installed Debian, but not of its container images. gcc and libc6-dev build the
# simulated NVML of the test cluster; g++, and python3-dev for Debian's Python, the extension of straggler detection.
debian_packages=(slurm-wlm slurm-wlm-basic-plugins munge iproute2 procps gcc g++ libc6-dev python3-dev)
debian_services=(munge slurmctld slurmd) # of the packages of the same names

say() { echo "$program: $*"; }

die() {
    say "$*" >&2
    exit 2
}

set_up() {
    require_root
    # Two at once: the second waits, then finds everything done. The lock is on a file that is there anyway;
    # it stays with pip when only this shell is killed, so nobody meddles while pip still writes.
    exec 9>>"$clone/setup.cfg" || die "cannot write in $clone: use a clone of your own"
    flock --nonblock 9 || { say "waiting for another set-up of $clone to end" && flock 9; }
    log=$(mktemp) || die "cannot write temporary files: is ${TMPDIR:-/tmp} full?"
    trap 'remove_policy; rm -f -- "$log"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP

    local python='' missing
    missing=$(missing_packages "${debian_packages[@]}") || exit
    if ! venv_is_usable && ! python=$(find_python); then
        # Debian's python3 alone cannot make virtual environments: it keeps ensurepip in a package of its own.
        missing+=" python3 python3-venv"
    fi
    if [[ -n $missing ]]; then
        # shellcheck disable=SC2086 # a list of words
        install_packages $missing
    fi
    if ! venv_is_ready; then
        if [[ -z $python ]] && ! venv_is_usable; then
            python=$(find_python) || die "found no Python 3.10 or newer that can make virtual environments," \
                "and Debian's python3 here is older: put one on PATH (python3.10 … python3.13)"
        fi
        make_venv "$python"
    fi

    rm -f -- "$log"
    trap - EXIT INT TERM HUP
    exec 9>&-
}

# ── Who runs what ─────────────────────────────────────────────────────────────────────────────────

is_root() { ((EUID == 0)); }

require_root() {
    is_root && return
    local why="it installs Debian packages and starts a Slurm cluster in network namespaces"
    command -v sudo >/dev/null || die "needs root ($why), and there is no sudo here: run it as root"
    sudo -n true 2>/dev/null && return
    [[ -t 2 ]] || die "needs root ($why), and sudo has no terminal to ask for a password: run it as root"
    sudo -v || die "needs root ($why), and sudo refused: run it as root"
}

as_root() {
    if is_root; then "$@"; else sudo -E -H env "PATH=$PATH" "$@"; fi
}

# The user whose clone this is when root works on it for somebody through sudo; else nothing.
sudo_user() {
    if is_root && [[ ${SUDO_UID:-0} != 0 && $(stat -c %u -- "$clone") == "$SUDO_UID" ]]; then
        echo "$SUDO_UID"
    fi
}

as_user() {
    local uid entry
    uid=$(sudo_user)
    if [[ -z $uid ]]; then
        "$@"
        return
    fi
    entry=$(getent passwd "$uid") || die "the user with id $uid, who called sudo, is unknown here: run it as root"
    IFS=: read -r name _ _ gid _ home _ <<<"$entry"
    setpriv --reuid "$uid" --regid "$gid" --init-groups env "HOME=$home" "USER=$name" "LOGNAME=$name" "$@"
}

give_back_files() {
    local uid
    if is_root; then uid=$(sudo_user); else uid=$(id -u); fi
    if [[ -n $uid && $uid != 0 ]]; then
        as_root find "$clone" -xdev -uid 0 -exec chown -h "$uid:$(stat -c %g -- "$clone")" {} +
    fi
}

# ── Debian packages ───────────────────────────────────────────────────────────────────────────────

missing_packages() {
    command -v dpkg-query >/dev/null ||
        die "this is no Debian-like system, and the set-up knows only those (made for Debian 12 and 13):" \
            "elsewhere install Slurm, munge and iproute2, and this package with pip"
    local package
    for package; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || echo "$package"
    done
}

install_packages() {
    say "installing Debian packages: $*"
    command -v apt-get >/dev/null || die "there is no apt-get here: install $* by hand, then run this again"
    install_policy
    export DEBIAN_FRONTEND=noninteractive
    local new_services
    new_services=$(missing_packages "${debian_services[@]}")
    # A source that has nothing to do with these packages may be broken: what counts is the install.
    apt_get update >>"$log" 2>&1 </dev/null || true
    # After a set-up that was killed half-way apt insists on this.
    as_root dpkg --configure -a >>"$log" 2>&1 </dev/null 9>&- || true
    if ! apt_get install -y --no-install-recommends "$@" >>"$log" 2>&1 </dev/null; then
        give_up "the Debian packages $* could not be installed" \
            "check the network and /etc/apt, or install them by hand"
    fi
    # shellcheck disable=SC2086 # a list of words
    keep_services_off $new_services
    remove_policy
}

apt_get() {
    # Without the set-up's lock: a daemon that some package starts would keep it for ever.
    as_root apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 -o Acquire::http::Timeout=30 "$@" 9>&-
}

# The test cluster brings its own daemons; those of the packages must not start. Debian asks policy-rc.d,
# which exists only where an administrator put one: then it is left alone. Ours speaks for these services
# only, and only while this process lives, so that one left by a killed set-up forbids nothing.
install_policy() {
    if [[ -e $policy_file ]] && ! grep -qs nvrx-slurm -- "$policy_file"; then
        return
    fi
    as_root tee -- "$policy_file" >/dev/null <<POLICY
#!/bin/sh
# From the set-up of nvrx-slurm, which removes it when it ends. Without process $$ it forbids nothing.
kill -0 $$ 2>/dev/null || exit 0
case \$1 in munge*|slurm*) exit 101 ;; esac
exit 0
POLICY
    as_root chmod 755 -- "$policy_file"
}

remove_policy() {
    if grep -qs nvrx-slurm -- "$policy_file"; then
        as_root rm -f -- "$policy_file"
    fi
}

# … and at the next boot they must not start either, if it was this set-up that brought them.
keep_services_off() {
    if (($#)) && [[ -d $systemd_mark ]]; then
        as_root systemctl --quiet disable --now "$@" >>"$log" 2>&1 || true
    fi
}

# ── Python ────────────────────────────────────────────────────────────────────────────────────────

# The first Python 3.10 or newer on PATH that can make a virtual environment with pip in it.
find_python() {
    local name path
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        while read -r path; do
            if as_user "$path" -I -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
                >/dev/null 2>&1 </dev/null; then
                echo "$path"
                return
            fi
        done < <(type -aP "$name")
    done
    return 1
}

# The stamp's first line: which Python the .venv is of, and where it was made, since it cannot be moved.
# Fails where the .venv is broken.
venv_identity() {
    local python
    python=$("$venv/bin/python" -I -c \
        'import os, pip, sys
sys.version_info >= (3, 10) or sys.exit(1)
print(os.path.realpath(sys.executable), sys.version.split()[0])' 2>/dev/null) &&
        echo "$python $venv"
}

# The stamp's second line: everything that decides what is installed, the source of the extension included.
wanted_packages() {
    (cd "$clone" && cat setup.cfg setup.py pyproject.toml constraints.txt csrc/cupti/* | sha256sum)
}

venv_is_ready() {
    [[ -x $venv/bin/nvrx-srun && -r $stamp ]] &&
        [[ $(<"$stamp") == "$(venv_identity && wanted_packages)" ]]
}

# A .venv is kept when it works and is of this place: then only its packages are brought up to date. It is
# made anew when its stamp says that a set-up was killed in the middle, or that Python or the clone moved.
venv_is_usable() {
    local identity
    identity=$(venv_identity) || return 1
    [[ ! -e $stamp || $(head -n 1 -- "$stamp") == "$identity" ]]
}

make_venv() {
    if [[ -e $venv ]] && ! as_user test -w "$venv"; then
        die "$venv belongs to another user: remove it, then run this again"
    fi
    if ! venv_is_usable; then
        say "creating $venv with $1"
        as_user rm -rf -- "$venv"
        as_user mkdir -- "$venv" || die "cannot create $venv: use a clone of your own, on a disk that has space"
        write_stamp incomplete
        as_user "$1" -m venv "$venv" >>"$log" 2>&1 </dev/null ||
            give_up "the virtual environment could not be made" "check that '$1 -m venv' works"
    fi
    say "installing Python packages; torch alone can take minutes"
    write_stamp incomplete
    (cd "$clone" && as_user "$venv/bin/python" -m pip install --no-input --disable-pip-version-check \
        -c constraints.txt -e '.[dev]') >>"$log" 2>&1 </dev/null || {
        # pip ended in order, so what it did stays of use: no need to begin anew the next time.
        (write_stamp "$(venv_identity)") 2>/dev/null || true
        give_up "the Python packages could not be installed" \
            "check that pip reaches a package registry ('pip config list' shows which)"
    }
    write_stamp "$(venv_identity && wanted_packages)"
}

write_stamp() {
    as_user tee -- "$stamp" <<<"$1" >/dev/null || die "cannot write $stamp: is the disk full?"
}

# ── Failing ───────────────────────────────────────────────────────────────────────────────────────

give_up() {
    tail -n 15 -- "$log" | sed 's/^/    /' >&2
    if grep -q 'No space left on device' -- "$log"; then
        die "$1, because the disk is full: free some space, then run this again"
    fi
    die "$1 (last lines above): $2, then run this again"
}
