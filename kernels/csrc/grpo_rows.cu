// The row kernel on the device: one block a row, the row resident in registers and shared memory (row_tiles.h), so that
// a row of logits is read once and written once: 2 * 303872 bytes for 151936 bfloat16 columns. No torch headers.
//
//   nvcc -O3 -std=c++17 -shared -Xcompiler -fPIC -gencode arch=compute_80,code=sm_80 ... grpo_rows.cu   (see build.py)

#include <cuda_runtime.h>

#include "row_tiles.h"

static_assert(sizeof(Vec16) == 16, "a vector is one 16-byte transaction");

// The merge of a warp's 32 statistics, in its lane 0.
__device__ __forceinline__ Statistics reduce_warp(Statistics part, float scale) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Statistics other{__shfl_down_sync(0xffffffffu, part.maximum, distance),
                           __shfl_down_sync(0xffffffffu, part.sum, distance),
                           __shfl_down_sync(0xffffffffu, part.weighted, distance)};
    part = merge(part, other, scale);
  }
  return part;
}

// The statistics of the whole block, in thread 0. The order of the merges is fixed: results repeat bit by bit.
template <int THREADS>
__device__ __forceinline__ Statistics reduce_block(Statistics part, Statistics* partial, float scale) {
  static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps, and one warp reduces what they leave");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  part = reduce_warp(part, scale);
  if (lane == 0) partial[warp] = part;
  __syncthreads();
  if (warp > 0) return part;
  return reduce_warp(lane < THREADS / 32 ? partial[lane] : no_statistics(), scale);
}

template <class T, int THREADS, int R, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rows_kernel(const GrpoRowsArgs args, int capacity) {
  extern __shared__ Vec16 shared[];
  __shared__ Statistics partial[THREADS / 32];
  __shared__ RowGradient of_row;
  __shared__ TokenInputs inputs;  // in shared memory: as registers they would cost every thread
  static_assert(sizeof(partial) + sizeof(of_row) + sizeof(inputs) <= GRPO_STATIC_SHARED, "see shared_budget");

  const int64_t index = blockIdx.x;
  const int thread = threadIdx.x;
  const float scale = args.base2_scale;
  const Row<T> row = row_at<T>(args, index, THREADS * R, capacity);
  if (args.token_weights[index] == 0) {  // not even read: it may hold NaN
    if (thread == 0) {
      TokenTerms terms;
      finish_row(args, TokenInputs{}, no_statistics(), terms);
      store_terms(args, index, terms);
    }
    if (args.backward) clear_row<T, THREADS>(row, thread);
    return;
  }

  // Read before the second pass overwrites it; the barriers of the reduction lie in between.
  if (thread == 0) inputs = token_inputs(args, row, index);
  Vec16 held[R];
  const Statistics part = read_row<T, THREADS>(row, thread, held, shared, scale);
  const Statistics whole = reduce_block<THREADS>(part, partial, scale);
  if (thread == 0) {
    TokenTerms terms;
    of_row = finish_row(args, inputs, whole, terms);
    store_terms(args, index, terms);
  }
  if (!args.backward) return;
  __syncthreads();
  const RowGradient gradient = of_row;
  if (gradient.idle) {
    clear_row<T, THREADS>(row, thread);
    return;
  }
  if (args.entropy_coef != 0) {
    write_row<T, THREADS, R, true>(row, thread, held, shared, gradient, scale);
  } else {
    write_row<T, THREADS, R, false>(row, thread, held, shared, gradient, scale);
  }
  write_target(row, thread, THREADS, gradient);
}

template <class T, int VARIANT>
static cudaError_t launch(const GrpoRowsArgs& args, int64_t limit) {
  constexpr Variant variant = VARIANTS[VARIANT];
  const auto kernel = rows_kernel<T, variant.threads, variant.registers, variant.blocks_per_sm>;
  const int capacity = int(shared_capacity(variant, args.vocab / T::PER_VECTOR, limit));
  const int bytes = capacity * int(sizeof(Vec16));
  // Above 48 KB a kernel must ask. Once per launch: the attribute belongs to the current device.
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(args.rows), variant.threads, bytes, static_cast<cudaStream_t>(args.stream)>>>(args, capacity);
  return cudaGetLastError();
}

template <class T>
static cudaError_t launch_variant(const GrpoRowsArgs& args, int variant, int64_t limit) {
  if (variant == 0) return launch<T, 0>(args, limit);
  if (variant == 1) return launch<T, 1>(args, limit);
  return launch<T, 2>(args, limit);
}

static cudaError_t device_limit(int64_t* limit) {
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  *limit = bytes;
  return error;
}

extern "C" {

int grpo_rows(const GrpoRowsArgs* args) {
  int64_t limit = 0;
  const cudaError_t error = device_limit(&limit);
  if (error != cudaSuccess) return int(error);
  if (args->shared_limit > limit) return GRPO_BAD_SHARED;
  if (args->shared_limit > 0) limit = args->shared_limit;
  int variant = args->variant;
  const int code =
      choose(args->rows, args->vocab, args->row_stride, args->dtype, limit, DEVICE_VARIANTS, &variant);
  if (code || args->rows == 0) return code;
  if (args->dtype == GRPO_FLOAT32) return int(launch_variant<Float32>(*args, variant, limit));
  if (args->dtype == GRPO_BFLOAT16) return int(launch_variant<Bfloat16>(*args, variant, limit));
  return int(launch_variant<Float16>(*args, variant, limit));
}

const char* grpo_rows_error(int code) {
  return code < 0 ? grpo_own_error(code) : cudaGetErrorString(static_cast<cudaError_t>(code));
}

int grpo_rows_args_size(void) { return int(sizeof(GrpoRowsArgs)); }

int grpo_rows_needs_device(void) { return 1; }

int grpo_rows_plan(int64_t vocab, int32_t dtype, int64_t limit, int32_t variant, GrpoRowsPlan* plan) {
  return plan_row(vocab, dtype, limit, DEVICE_VARIANTS, variant, plan);
}

}  // extern "C"
