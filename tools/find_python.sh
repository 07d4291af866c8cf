#!/bin/sh
# Prints the Python 3.10 to 3.14 with which the Makefile makes the virtual environment $1: $PYTHON if set, else the environment's own
# (a later call), else the active environment's, else the first on PATH.
# Not uv: a new user has Python, and the active Python matters because its torch may be reused.
environment=$1

try() {
    # Run each candidate: version managers leave commands on PATH that only print an error.
    found=$("$1" -c 'import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 14); print(sys.executable)' 2>/dev/null) || return
    echo "$found"
    exit 0
}

if [ -n "$PYTHON" ]; then
    try "$PYTHON"
    echo "volta_fa: PYTHON=$PYTHON is not a Python 3.10 to 3.14" >&2
    exit 1
fi
for prefix in "$environment" "$VIRTUAL_ENV" "$CONDA_PREFIX"; do
    if [ -n "$prefix" ]; then try "$prefix/bin/python"; fi
done
for command in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
    try "$command"
done
echo "volta_fa: no Python 3.10 to 3.14 found: install one (conda, pyenv or the system's packages), or name it: make PYTHON=/path/to/python3" >&2
exit 1
