#!/usr/bin/env bash
# receive.sh PART: take one part of the data, and write every set that is complete. Carries PART.
. benchmarks/gpu/env.sh
mv "$1"/* $ROOT/in/ && python3 benchmarks/gpu/data.py unpack $ROOT/in $ROOT
bash benchmarks/gpu/show.sh
