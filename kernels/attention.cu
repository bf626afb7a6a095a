// Launchers of one instance: head dim, row tiles, element type and shared memory come from the
// compiler's command line (instances.py). Every one returns a cudaError_t.
#if VEGAS_WGMMA
#include "attend_hopper.cuh"
#else
#include "attend.cuh"
#endif

namespace {

constexpr bool kHasSparse = kRowTiles == 1 && (VEGAS_WGMMA || kRowWarps == 1);

cudaError_t prepare(void (*kernel)(AttendParams), int* ctas) {
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

// Drafts have one query: only the smallest instance has a kernel for them.
template <bool kExists>
auto sparse_kernel() -> void (*)(AttendParams) {
  if constexpr (kExists) return attend_kernel<true, false>;
  else return nullptr;
}

}  // namespace

extern "C" {

// Loads the kernels (which a graph capture couldn't) and says how many CTAs the device runs at once,
// rows that a workspace slot has, and how large the parameters are.
int vegas_prepare(int device, int* num_ctas, int* slot_rows, int* attend_bytes, int* plan_bytes) {
  cudaError_t error = cudaSetDevice(device);
  int ctas = kCtas, processors = 0;
  if (error == cudaSuccess) error = prepare(attend_kernel<false, false>, &ctas);
  if (error == cudaSuccess) error = prepare(attend_kernel<false, true>, &ctas);
  if (error == cudaSuccess && kHasSparse) error = prepare(sparse_kernel<kHasSparse>(), &ctas);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, combine_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, plan_kernel<kTileTokens>);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  *num_ctas = ctas * processors;
  *slot_rows = kSlotRows;
  *attend_bytes = sizeof(AttendParams);
  *plan_bytes = sizeof(PlanParams);
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
  cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  auto* kernel = scores ? attend_kernel<false, true> : attend_kernel<false, false>;
  if (sparse) kernel = sparse_kernel<kHasSparse>();
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  kernel<<<num_ctas, kThreads, kSharedBytes, on>>>(*params);
  if (params->num_queries * params->group > kMaxRowsInPlace) {
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    const dim3 grid(num_ctas,
                    div_up(kHeads * params->num_queries * params->group * kEights, kCombineThreads));
    combine_kernel<<<grid, kCombineThreads, 0, on>>>(*params);
  }
  return cudaGetLastError();
}

const char* vegas_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}
const char* vegas_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
