#!/bin/sh
# Makes .venv with everything that the demo and the tests need. Installs Debian packages when run as
# root, else names the missing ones. Runs again only when the project's metadata has changed, or $PYTHON.
# shellcheck disable=SC2086,SC2231 # variables are lists of words
set -eu
cd "$(dirname "$0")/.."

# The interpreter that .venv is made with: the one named, else that of an existing .venv, else python3.
[ -x .venv/bin/python ] && usual=.venv/bin/python || usual=python3
python=${PYTHON:-$usual}
then="then name it: PYTHON=python3.12 make setup"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || {
    echo "error: $python does not run here; install Python 3.11 or newer, $then" >&2
    exit 2
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is Python $version, but 3.11 or newer is needed; install one, $then" >&2
    exit 2
}

PATH=$PATH:/usr/sbin:/sbin
need="" # Debian packages whose command or file isn't there
command -v clang >/dev/null || need="$need clang"
command -v ip >/dev/null || need="$need iproute2"
command -v ethtool >/dev/null || need="$need ethtool" # the tests'
command -v sysctl >/dev/null || need="$need procps"   # the tests'
[ -e /usr/include/bpf/bpf_helpers.h ] || need="$need libbpf-dev"
[ -e /usr/include/linux/bpf.h ] || need="$need linux-libc-dev"
ldconfig -p 2>/dev/null | grep -q 'libbpf\.so\.1' || /sbin/ldconfig -p | grep -q 'libbpf\.so\.1' || need="$need libbpf1"
first="" # the only one that .venv needs; the others come while pip works
"$python" -c 'import ensurepip, venv' 2>/dev/null || first=" python$version-venv"

debian() {
    [ $# = 0 ] || apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Long commands run beside this shell, which acts on a signal only while it waits. Those that are left at the end are
# ended with their children, but for apt-get, which would leave packages half installed.
beside="" packages="" scratch=.venv/tmp wheels=.venv/wheels
start() {
    setsid "$@" &
    beside="$beside $!"
}
run() {
    start "$@"
    wait "$!" && beside=${beside% *} # it was the last; another process may get its number
}
debian_is_done() {
    [ -z "$packages" ] || wait "$packages" || {
        echo "error: apt-get can't install$need" >&2
        exit 2
    }
}
end() {
    trap '' INT TERM
    for one in $beside; do kill -- "-$one" 2>/dev/null || :; done
    if [ -n "$packages" ] && kill -0 "$packages" 2>/dev/null; then echo "waiting for apt-get" >&2; fi
    wait
    rm -rf $scratch $wheels
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ -n "$need$first" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing Debian packages:$need$first"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        debian $first
        debian $need &
        packages=$!
    else
        echo "missing Debian packages:$need$first" >&2
        echo "install them (apt-get install$need$first), or run this as root" >&2
        exit 2
    fi
fi

stamp=.venv/.ready
wanted="$version $(cat pyproject.toml setup.cfg constraints*.txt checkmate/cli/shell.txt tools/setup.sh | sha256sum)"
if [ "$(cat $stamp 2>/dev/null)" = "$wanted" ]; then
    debian_is_done
    exit 0
fi
echo "making .venv with Python $version (once; a minute or two)"
pip=".venv/bin/python -m pip --disable-pip-version-check --quiet"
hashed="--require-hashes --no-deps --only-binary :all: --requirement"
# pip checks the hash of each file, or of none in one call. Itself first: Debian's takes twice as long.
made="$version $(sha256sum <constraints-pip.txt)"
export TMPDIR="$PWD/$scratch"
if [ "$(cat .venv/.made 2>/dev/null)" != "$made" ]; then
    run "$("$python" -c 'import sys; print(sys._base_executable)')" -m venv --clear .venv
    mkdir -p $scratch
    run $pip install --no-compile $hashed constraints-pip.txt
    echo "$made" >.venv/.made
fi
mkdir -p $scratch $wheels
# An environment that has all needs no index. Otherwise most of pip's time goes to it, so three ask it at once.
if ! run $pip install --no-index --no-compile $hashed constraints.txt 2>/dev/null; then
    beside=""
    awk '/^[^ #]/ { part = ++count % 3 } { print >"'$wheels'/" part ".txt" }' constraints.txt
    for part in $wheels/?.txt; do start $pip download --dest $wheels $hashed "$part"; done
    for one in $beside; do wait "$one"; done
    beside=""
    run $pip install --no-compile --no-index --find-links $wheels $hashed constraints.txt
fi
# Nothing is built here but this project, with the setuptools just installed.
run env PYTHONWARNINGS=ignore $pip install --no-deps --no-build-isolation --editable .
start .venv/bin/checkmate shell --install
shell=$!
# torch comes last, so that of what it needs only its CUDA packages are left; it may be a local build.
run $pip install --no-compile --constraint constraints-torch.txt torch
run $pip check
# Compiles what the demo and the tests import, a quarter of all modules, before several processes do it at once.
run env PYTHONDONTWRITEBYTECODE= .venv/bin/python -c "
import checkmate.examples.hsdp, hypothesis, pytest, topologies.training.demo, torch._dynamo, torch.distributed.run"
wait "$shell"
beside=""
debian_is_done
echo "$wanted" >$stamp
