// Launchers of one instance: head dim, row tiles, element type and shared memory come from the
// compiler's command line (instances.py). Every one returns a cudaError_t.
#include "attend.cuh"
#include "combine.cuh"
#include "plan.cuh"

namespace {

constexpr bool kHasSparse = kRowTiles == 1 && kRowWarps == 1;

template <bool kSparse, bool kScores>
cudaError_t prepare(int* ctas) {
  auto* kernel = &attend_kernel<kSparse, kScores>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           kSharedBytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  int fits = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fits, kernel, kThreads, kSharedBytes);
  *ctas = min(*ctas, fits);
  return error;
}

template <bool kSparse, bool kScores>
cudaError_t launch(const AttendParams& params, int num_ctas, cudaStream_t stream) {
  attend_kernel<kSparse, kScores><<<num_ctas, kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

extern "C" {

// Loads the kernels (which a graph capture couldn't) and says how many CTAs the device runs at once,
// rows that a workspace slot has, and tokens of a tile.
int vegas_prepare(int device, int* num_ctas, int* slot_rows, int* tile_tokens) {
  cudaError_t error = cudaSetDevice(device);
  int ctas = kCtas, processors = 0;
  if (error == cudaSuccess) error = prepare<false, false>(&ctas);
  if (error == cudaSuccess) error = prepare<false, true>(&ctas);
  if constexpr (kHasSparse) {
    if (error == cudaSuccess) error = prepare<true, false>(&ctas);
  }
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, combine_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, plan_kernel<kTileTokens>);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  *num_ctas = ctas * processors;
  *slot_rows = kRows;
  *tile_tokens = kTileTokens;
  return error;
}

int vegas_plan(int device, const PlanParams* params, void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  plan_kernel<kTileTokens><<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
  return cudaGetLastError();
}

int vegas_attend(int device, const AttendParams* params, int num_ctas, int sparse, int scores,
                 void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const auto on = static_cast<cudaStream_t>(stream);
  if (!sparse) {
    return scores ? launch<false, true>(*params, num_ctas, on)
                  : launch<false, false>(*params, num_ctas, on);
  }
  if constexpr (kHasSparse) return launch<true, false>(*params, num_ctas, on);
  return cudaErrorInvalidValue;
}

int vegas_combine(int device, const CombineParams* params, void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const dim3 grid(params->num_kv_heads * params->batch,
                  div_up(params->num_queries * params->group, kCombineWarps));
  combine_kernel<<<grid, kCombineWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(*params);
  return cudaGetLastError();
}

const char* vegas_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}
const char* vegas_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
