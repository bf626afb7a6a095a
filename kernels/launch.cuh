// Launches whose start overlaps with the end of the kernel before them, where the device can do that
// (programmatic dependent launch, compute capability 9.0): in a layer of microseconds the gaps count.
//
// A kernel that is launched so calls wait_for_previous before it touches global memory. Every kernel
// lets the next one start at once: that one waits for it to end.
#pragma once
#include <cuda_runtime.h>

#include <cstdlib>

__device__ __forceinline__ void wait_for_previous() {
#if VEGAS_OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, void* stream,
                   const Params& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = VEGAS_OVERLAP && !getenv("EXP_NO_PDL");
  return cudaLaunchKernelEx(&config, kernel, params);
}
