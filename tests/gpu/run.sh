#!/bin/sh
# Builds and runs tests/gpu/kernels_check.cu on this machine's GPU: checks, memcheck, racecheck, timings.
# Usage: tests/gpu/run.sh [folder for build and logs]. Needs nvcc; compute-sanitizer when it is there.
set -eu
cd "$(dirname "$0")/../.."
out=${1:-build/gpu}
mkdir -p "$out"
arch=${EDGEYOLO_GPU_ARCH:-native}
flags="-std=c++17 -O3 --fmad=false -arch=$arch -Icpp -Xcompiler -ffp-contract=off"
cpu="cpp/decode.cpp cpp/decode_kernels.cpp cpp/letterbox.cpp cpp/letterbox_plan.cpp cpp/letterbox_scalar.cpp
    cpp/letterbox_avx2.cpp cpp/letterbox_neon.cpp cpp/nms.cpp cpp/nms_kernels.cpp cpp/simd.cpp"
objects=""
pids=""
for source in $cpu; do
    object="$out/$(basename "$source" .cpp).o"
    ${CXX:-g++} -std=c++17 -O2 -ffp-contract=off -Icpp -c "$source" -o "$object" & pids="$pids $!"
    objects="$objects $object"
done
for pixels in 1 2 4; do
    nvcc $flags -DEDGEYOLO_THREAD_PIXELS=$pixels -c tests/gpu/kernels_check.cu -o "$out/check$pixels.o" & pids="$pids $!"
done
for pid in $pids; do wait "$pid"; done
for pixels in 1 2 4; do
    nvcc -arch=$arch "$out/check$pixels.o" $objects -o "$out/kernels_check$pixels"
done
status=0
"$out/kernels_check4" check 2>&1 | tee "$out/check.log"
grep -q " 0 failed" "$out/check.log" || status=1
"$out/kernels_check4" time 2>&1 | tee "$out/time.log"
for pixels in 1 2; do "$out/kernels_check$pixels" time 2>&1 | tee "$out/time$pixels.log"; done
if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck initcheck synccheck; do
        timeout 120 compute-sanitizer --tool $tool --error-exitcode 3 "$out/kernels_check4" small \
            > "$out/$tool.log" 2>&1 || status=1
        echo "$tool: $(tail -1 "$out/$tool.log")"
    done
fi
exit $status
