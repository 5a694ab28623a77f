#!/bin/bash
# Builds the aggregator of kernel records, its buffers and the CUPTI source with AddressSanitizer and
# UndefinedBehaviorSanitizer, then with ThreadSanitizer, and runs stress.cpp over the simulated libcupti.
# Exits 0 if both find nothing. Takes about a minute. Needs g++ with its sanitizers.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "$0")")
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
sources=("$here"/../cupti/{activity,aggregator,collector,library}.cpp "$here/stress.cpp")
flags=(-std=c++17 -O1 -g -Wall -Wextra -Werror -fno-omit-frame-pointer -fno-sanitize-recover=all -pthread)
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

for sanitizers in address,undefined thread; do
    folder=$work/$sanitizers
    mkdir -- "$folder"
    "${CXX:-g++}" "${flags[@]}" "-fsanitize=$sanitizers" -fPIC -shared -o "$folder/libcupti.so.13" "$here/cupti_sim.cpp"
    "${CXX:-g++}" "${flags[@]}" "-fsanitize=$sanitizers" -o "$folder/stress" "${sources[@]}" -ldl
    echo "$sanitizers: $("$folder/stress" "$folder/libcupti.so.13")"
done
