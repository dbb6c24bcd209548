#!/bin/sh
# Fetches and converts the model that OCTAVO_MODEL names (unset: the default one), and lets /models/served point at it.
set -eu
folder=$(octavo model path ${OCTAVO_MODEL:+"$OCTAVO_MODEL"})
ln -sfn "$folder" "/models/served.$$"
mv -T "/models/served.$$" /models/served
echo "/models/served is $folder"
