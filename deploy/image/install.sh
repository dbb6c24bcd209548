#!/bin/sh
# Makes /opt/octavo, what an image runs, in two steps, so that a change of our code leaves the first one's layer as it is:
#
#   install.sh packages FILE    what others have made, by version and hash; and what `own` builds with, outside of it
#   install.sh own FOLDER...    our distributions
set -eu
into_octavo() { pip --python /opt/octavo/bin/python install --no-cache-dir "$@"; }

step=$1
shift
case $step in
packages)
    pip install --no-cache-dir --require-hashes -r build.txt
    python -m venv --without-pip /opt/octavo
    into_octavo --require-hashes -r "$1"
    ;;
own)
    pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels "$@"
    into_octavo --no-index --no-deps /wheels/*.whl
    ;;
esac
