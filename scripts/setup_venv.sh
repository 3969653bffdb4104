#!/usr/bin/env bash
# Makes .venv with the pinned packages of constraints.txt and this checkout installed in it (editable), or does nothing
# when that already stands. `make setup` calls it, and so does every lane that needs Python.
#
#   PYTHON       the interpreter to build on; by default the first suitable one of the list below
#   TORCH_INDEX  a package index to take torch from; by default pip's own configuration decides
#
# What was built is written into .venv/setup-stamp as the very last thing: a set-up that was interrupted has no stamp and
# is completed by the next call, and a change of pyproject.toml, constraints.txt, this file or the checkout's place makes
# the stamp stale. Contents are compared, not times, for a clone or a branch switch touches every file.
#
# Runs on bash 3.2 and with BSD tools (macOS). No arrays that may be empty: bash 3.2 takes them for unset.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Settings of the caller's shell that would send pip or Python elsewhere than into .venv.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX
export PIP_USER=0 PYTHONNOUSERSITE=1

readonly VENV=.venv
readonly STAMP=$VENV/setup-stamp
readonly SETUP_LOG=$VENV/setup.log
readonly LOCK=.venv.lock
readonly OLDEST=11 NEWEST=14          # Python 3.x: the pinned set has wheels for these
readonly CANDIDATES="python3 python3.13 python3.12 python3.11 python3.14"
readonly FRESH_MB=2500 UPDATE_MB=500  # .venv takes 1.4 GB with torch's CPU build; the rest is room to unpack
readonly CUDA_MB=12000                # 6 GB in .venv, and the downloads beside it until they are unpacked
TORCH_PIN=$(grep '^torch==' constraints.txt)
readonly TORCH_PIN EXTRAS=rowdit,data,test,dev

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# ---------------------------------------------------------------------------------------------- which Python
describe_python() {  # COMMAND -> "3.12.1 /usr/bin/python3.12", or nothing where it doesn't run
    "$1" -c 'import os, sys; print("%d.%d.%d" % sys.version_info[:3], os.path.realpath(sys.executable))' \
        2>/dev/null </dev/null || true
}

is_supported() {  # VERSION
    local minor
    case $1 in 3.*) ;; *) return 1 ;; esac
    minor=${1#3.}
    minor=${minor%%.*}
    [ "$minor" -ge "$OLDEST" ] && [ "$minor" -le "$NEWEST" ]
}

has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null; }

install_hint() {
    case $(uname -s) in
        Darwin) printf 'install one with "brew install python@3.13" or from python.org' ;;
        *) printf 'install one with "sudo apt install python3 python3-venv" (Debian 12, Ubuntu 24.04 and later)' ;;
    esac
}

fail_without_venv() {  # COMMAND VERSION
    local minor=${2%.*}
    case $(uname -s) in
        Darwin) fail "$1 ($2) has no venv and ensurepip modules: $(install_hint), or name another one with PYTHON=..." ;;
        *) fail "$1 ($2) has no venv and ensurepip modules: \"sudo apt install python$minor-venv\"," \
            "or name another Python with PYTHON=..." ;;
    esac
}

find_python() {  # sets python_command and python_facts ("VERSION PATH")
    local candidate facts found="" without_venv=""
    if [ -n "${PYTHON:-}" ]; then
        facts=$(describe_python "$PYTHON")
        [ -n "$facts" ] || fail "PYTHON=$PYTHON is no Python that runs: name Python 3.$OLDEST to 3.$NEWEST, or leave it out"
        is_supported "${facts%% *}" ||
            fail "PYTHON=$PYTHON is ${facts%% *}, and Python 3.$OLDEST to 3.$NEWEST is needed: $(install_hint)"
        has_venv "$PYTHON" || fail_without_venv "$PYTHON" "${facts%% *}"
        python_command=$PYTHON python_facts=$facts
        return
    fi
    for candidate in $CANDIDATES; do
        facts=$(describe_python "$candidate")
        [ -n "$facts" ] || continue
        if ! is_supported "${facts%% *}"; then
            found="${found:+$found, }$candidate ${facts%% *}"
        elif ! has_venv "$candidate"; then
            without_venv=${without_venv:-$candidate ${facts%% *}}
        else
            python_command=$candidate python_facts=$facts
            return
        fi
    done
    [ -z "$without_venv" ] || fail_without_venv "${without_venv%% *}" "${without_venv##* }"
    fail "Python 3.$OLDEST to 3.$NEWEST is needed, found ${found:-none}: $(install_hint), or name one with PYTHON=..."
}

# ---------------------------------------------------------------------------------------------- what stands already
wanted_state() { printf '%s|%s\n' "$PWD" "$(cat pyproject.toml constraints.txt scripts/setup_venv.sh | cksum)"; }

recorded() {  # FIELD -> its value in the stamp, or nothing
    [ ! -f "$STAMP" ] || sed -n "s/^$1=//p" "$STAMP"
}

stands() {
    [ "$(recorded state)" = "$(wanted_state)" ] || return 1
    [ -z "${TORCH_INDEX:-}" ] || [ "$TORCH_INDEX" = "$(recorded torch_index)" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(describe_python "$PYTHON")" = "$(recorded python)" ] || return 1
    "$VENV/bin/python" -c '' >/dev/null 2>&1
}

must_start_over() {  # says why, or returns 1
    [ -e "$VENV" ] || return 1
    if ! "$VENV/bin/python" -c '' >/dev/null 2>&1; then
        say "the Python in .venv doesn't run: making it anew"
    elif ! is_supported "$(describe_python "$VENV/bin/python" | cut -d' ' -f1)"; then
        say "the Python in .venv is not 3.$OLDEST to 3.$NEWEST: making it anew"
    elif [ -n "$(recorded state)" ] && [ "$(recorded state | cut -d'|' -f1)" != "$PWD" ]; then
        say "this checkout was moved: making .venv anew"
    elif [ -n "${PYTHON:-}" ] && [ "$python_facts" != "$(describe_python "$VENV/bin/python")" ]; then
        say "another PYTHON was asked for: making .venv anew"
    elif [ -n "${TORCH_INDEX:-}" ] && [ -n "$(recorded state)" ] && [ "$TORCH_INDEX" != "$(recorded torch_index)" ]; then
        say "another TORCH_INDEX was asked for: making .venv anew"
    else
        return 1
    fi
}

# ---------------------------------------------------------------------------------------------- what could stop us
take_lock() {
    local owner waited=0
    until mkdir "$LOCK" 2>/dev/null; do
        [ -d "$LOCK" ] || fail "can't write in $PWD: $(mkdir "$LOCK" 2>&1 || true)"
        owner=$(cat "$LOCK/pid" 2>/dev/null || true)
        # No owner's number after 5 s: it was killed between making the folder and writing into it.
        if { [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; } || { [ -z "$owner" ] && [ "$waited" -ge 5 ]; }; then
            rm -rf "$LOCK"
            continue
        fi
        [ "$waited" -ne 0 ] || say "another set-up (process ${owner:-just started}) is at work here: waiting for it"
        sleep 1
        waited=$((waited + 1))
    done
    trap 'rm -rf "$LOCK"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    echo $$ >"$LOCK/pid" || fail "can't write in $PWD: is the disk full?"
}

free_mb() { df -Pk . | awk 'NR == 2 { for (i = 2; i <= NF; i++) if ($i ~ /%$/) { print int($(i - 1) / 1024); exit } }'; }

check_disk() {
    local free need=$FRESH_MB
    [ ! -d "$VENV" ] || [ -z "$(find "$VENV" -type d -path '*/site-packages/torch' -prune 2>/dev/null)" ] || need=$UPDATE_MB
    free=$(free_mb)
    [ "${free:-$need}" -ge "$need" ] ||
        fail "$free MB are free for $PWD, and $need MB are needed: free some, or clone onto another disk"
    if [ "$need" = "$FRESH_MB" ] && [ "$(uname -s)" = Linux ] && [ -z "${TORCH_INDEX:-}" ] && [ "$free" -lt "$CUDA_MB" ]; then
        say "note: $free MB are free; if pip picks torch's CUDA build it needs up to $CUDA_MB MB" \
            "(TORCH_INDEX=... can name PyTorch's CPU index: see the README)"
    fi
}

check_platform() {
    [ "$(uname -s)" = Darwin ] || return 0
    [ "$("$python_command" -c 'import platform; print(platform.machine())')" = arm64 ] ||
        fail "$python_command is an x86_64 Python, and there is no torch for it on macOS: use a Python built for Apple silicon"
}

explain_pip() {  # WHAT -> the one line that tells what went wrong
    local log=$SETUP_LOG missing
    missing=$(sed -n 's/.*No matching distribution found for //p' "$log" 2>/dev/null | tail -n 1)
    # A full disk takes pip's log with it, so its own words may be missing.
    if [ "$(free_mb)" -lt 50 ] || grep -qE 'No space left on device|Errno 28|Disk quota exceeded' "$log"; then
        fail "the disk is full ($(free_mb) MB free here; pip unpacks in ${TMPDIR:-/tmp} first, TMPDIR=... names another" \
            "folder). The same command goes on where it stopped. Log: $log"
    elif grep -qE 'CERTIFICATE_VERIFY_FAILED' "$log"; then
        fail "the package index's certificate was refused: check pip's \"cert\" setting. Log: $log"
    elif grep -qE 'NewConnectionError|Connection refused|[Nn]ame resolution|nodename nor servname|Network is unreachable|ConnectTimeout|Read timed out|ProxyError|Max retries exceeded|Connection reset|Connection aborted' "$log"; then
        fail "no package index could be reached for $1: check the network, the proxy and pip's index settings" \
            "(\"pip config list\"). The same command goes on where it stopped. Log: $log"
    elif [ -n "$missing" ]; then
        fail "the package index has no $missing for Python $(describe_python "$VENV/bin/python" | cut -d' ' -f1) on $(uname -sm). Log: $log"
    fi
    fail "pip couldn't install $1: its own words are above. Log: $log"
}

# ---------------------------------------------------------------------------------------------- the work
drop_half_installed() {
    # pip writes a package's INSTALLER file after all its other files: without it the package isn't whole, and pip would
    # take it for installed.
    local info
    for info in "$VENV"/lib/python*/site-packages/*.dist-info; do
        [ ! -d "$info" ] || [ -f "$info/INSTALLER" ] || rm -rf "$info"
    done
    rm -rf "$VENV"/lib/python*/site-packages/~*
}

pip_install() {  # WHAT ARGUMENT...
    local what=$1
    shift
    touch "$SETUP_LOG" 2>/dev/null || fail "can't write $SETUP_LOG: is the disk full? ($(free_mb) MB are free)"
    PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip --disable-pip-version-check --no-input --log "$SETUP_LOG" install \
        --constraint constraints.txt "$@" </dev/null || explain_pip "$what"
}

has_pinned_torch() {
    local version
    version=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || return 1
    [ "torch==${version%%+*}" = "$TORCH_PIN" ]
}

make_venv() {
    "$python_command" -m venv --clear "$VENV" >&2 ||
        fail "$python_command couldn't make .venv ($(free_mb) MB are free): its own words are above"
}

install_all() {
    # The build backend goes in first and at its pin: pip's isolated build would fetch an unpinned one.
    if has_pinned_torch; then
        say "2/3 torch is here"
    elif [ -n "${TORCH_INDEX:-}" ]; then
        say "2/3 torch, from $TORCH_INDEX"
        # That index has torch, but not everything that torch needs: the rest comes from where pip is configured to look.
        pip_install torch --index-url "$TORCH_INDEX" --no-deps "$TORCH_PIN"
    else
        say "2/3 torch, from where pip is configured to look (the CUDA build is gigabytes)"
        pip_install torch "$TORCH_PIN"
    fi
    say "3/3 the other packages, and this checkout"
    # Piped, so that a hundred lines about what is here already can go; torch kept its progress bar.
    { pip_install setuptools setuptools && pip_install "the packages" --no-build-isolation --editable ".[$EXTRAS]"; } |
        { grep --line-buffered -v '^Requirement already satisfied' || true; } || exit 1
}

works() {
    "$VENV/bin/python" - <<'PYTHON_END'
import importlib, sys
for name in ("torch", "numpy", "PIL", "safetensors", "tyro", "rich", "scipy", "matplotlib", "pytest", "hypothesis", "rowdit"):
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"setup: import {name}: {type(error).__name__}: {error}")
import torch
assert float((torch.ones(4, 4) @ torch.ones(4, 4)).sum()) == 64.0, "torch multiplies wrongly"
PYTHON_END
}

update_venv() {  # returns 1 where what stands can't be brought up to date
    drop_half_installed
    ls "$VENV"/lib/python*/site-packages/pip-*.dist-info/INSTALLER >/dev/null 2>&1 ||
        "$VENV/bin/python" -m ensurepip >/dev/null 2>&1 || return 1
    rm -f "$STAMP" "$SETUP_LOG"
    install_all
    works
}

build_venv() {
    [ -n "$python_command" ] || find_python
    check_platform
    check_disk
    say "1/3 .venv, with $python_command (${python_facts%% *})"
    rm -rf "$VENV"
    make_venv
    install_all
    works || fail "the new .venv doesn't work: the line above names the module"
}

main() {
    local begin=$SECONDS
    python_command="" python_facts=""
    ! stands || return 0
    [ -z "${PYTHON:-}" ] || find_python
    take_lock
    ! stands || return 0  # the one that we waited for has done it
    TORCH_INDEX=${TORCH_INDEX:-$(recorded torch_index)}
    if [ ! -e "$VENV" ] || must_start_over; then
        build_venv
    else
        say "1/3 .venv is here and is brought up to date"
        check_disk
        update_venv || { say "what stood in .venv can't be mended: making it anew" && build_venv; }
    fi
    printf 'state=%s\npython=%s\ntorch_index=%s\n' \
        "$(wanted_state)" "$(describe_python "$VENV/bin/python")" "$TORCH_INDEX" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "ready after $((SECONDS - begin)) s"
}

main
