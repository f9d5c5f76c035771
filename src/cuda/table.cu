#pragma once
#include "recipes.cu"
#include "softmax.cu"
#include "norms.cu"
#include "embedding.cu"
#include "largest.cu"
#include "update.cu"
#include "gemm_epilogues.cu"
#include "gemm_choices.cu"
#include "narrow.cu"
#include "attention_calls.cu"
/* ==== 8. TABLE ============================================================= >>table ==== */

namespace {

const mixp_kernels kernel_table = { mixpi_cuda_convert,
                                    mixpi_cuda_fill,
                                    mixpi_cuda_copy,
                                    mixpi_cuda_unary,
                                    mixpi_cuda_unary_backward,
                                    mixpi_cuda_binary,
                                    mixpi_cuda_binary_backward,
                                    mixpi_cuda_reduce,
                                    mixpi_cuda_reduce_backward,
                                    mixpi_cuda_softmax,
                                    mixpi_cuda_softmax_backward,
                                    mixpi_cuda_norm,
                                    mixpi_cuda_norm_backward,
                                    mixpi_cuda_embedding,
                                    mixpi_cuda_embedding_backward,
                                    mixpi_cuda_attention,
                                    mixpi_cuda_attention_backward,
                                    mixpi_cuda_cross_entropy,
                                    mixpi_cuda_cross_entropy_backward,
                                    mixpi_cuda_loss,
                                    mixpi_cuda_loss_backward,
                                    mixpi_cuda_dropout,
                                    mixpi_cuda_gemm,
                                    mixpi_cuda_scale_by,
                                    mixpi_cuda_grad_stats,
                                    mixpi_cuda_clip,
                                    mixpi_cuda_prepare,
                                    mixpi_cuda_update,
                                    mixpi_cuda_advance,
                                    mixpi_cuda_look,
                                    mixpi_cuda_agree,
                                    mixpi_cuda_where,
                                    mixpi_cuda_where_backward,
                                    mixpi_cuda_max,
                                    mixpi_cuda_max_backward,
                                    mixpi_cuda_gather,
                                    mixpi_cuda_gather_backward,
                                    mixpi_cuda_rope,
                                    mixpi_cuda_random,
                                    mixpi_cuda_compare,
                                    mixpi_cuda_topk,
                                    mixpi_cuda_add_norm,
                                    mixpi_cuda_cross_entropy_both,
                                    mixpi_cuda_gemm_epilogue,
                                    mixpi_cuda_quantise,
                                    mixpi_cuda_hadamard,
                                    mixpi_cuda_turn,
                                    mixpi_cuda_lose,
                                    mixpi_cuda_recode,
                                    mixpi_cuda_gemm_narrow,
                                    mixpi_cuda_restore,
                                    mixpi_cuda_check_buffers, NULL };

/* The epilogues of a context whose description names none, from a capability on. One measurement
 * decides a row (tests/cuda/gpu.sh, bench_cuda): flags that make GPT-2's step faster there. On an
 * H100 (GPT-2 124M, 64 sequences, bf16, cuBLASLt 13.1) a step takes 130.2 ms without, 126.5 with
 * GELU's and 127.9 with both. Other rows have not been measured. */
struct EpilogueRow { int capability, flags; };
const EpilogueRow epilogue_rows[] = {
    { 70, 0 }, { 80, 0 }, { 90, MIXP_EPILOGUES_GELU_BF16 }, { 100, 0 }
};

int epilogue_defaults(const mixp_exec *x) {
    int flags = 0;
    for (const EpilogueRow &row : epilogue_rows)
        if (row.capability <= state_of(x)->capability) flags = row.flags;
    return flags;
}

const int most_devices = 16;

template <int ordinal> mixp_result open_at(mixp_exec *x) { return device_open(x, ordinal); }

#define MIXPI_DEVICE(ordinal)                                                             \
    { "cuda", &kernel_table, device_allocate, device_release, device_upload, device_download, \
      device_wait, open_at<ordinal>, device_close, device_peek, capture_begin, \
      capture_end, replay, graph_free, device_message, device_check, device_feed, gemm_count, \
      device_post, device_collect, gemm_choices, epilogue_defaults }
const mixp_device device_table[most_devices] = {
    MIXPI_DEVICE(0), MIXPI_DEVICE(1), MIXPI_DEVICE(2), MIXPI_DEVICE(3),
    MIXPI_DEVICE(4), MIXPI_DEVICE(5), MIXPI_DEVICE(6), MIXPI_DEVICE(7),
    MIXPI_DEVICE(8), MIXPI_DEVICE(9), MIXPI_DEVICE(10), MIXPI_DEVICE(11),
    MIXPI_DEVICE(12), MIXPI_DEVICE(13), MIXPI_DEVICE(14), MIXPI_DEVICE(15)
};
#undef MIXPI_DEVICE

/* Why the driver does not answer. */
const char *driver_fault(cudaError_t e) {
    switch (e) {
    /* There is no GPU, or its driver is too old. */
    case cudaErrorInsufficientDriver:
        return "the NVIDIA driver is older than this build's CUDA version: update the driver";
    case cudaErrorNoDevice:
        return "no GPU is visible: there is no GPU, or CUDA_VISIBLE_DEVICES hides it";
    case cudaErrorCompatNotSupportedOnDevice:
        return "the CUDA compatibility package does not support this GPU "
               "(cudaErrorCompatNotSupportedOnDevice): update the driver";

    /* The driver does not start. */
    case cudaErrorInitializationError:
        return "CUDA could not be started (cudaErrorInitializationError): after fork(), a child "
               "cannot use CUDA if the parent has used it; use CUDA only in the child, or call "
               "exec";
    case cudaErrorSystemNotReady:
        return "the system is not ready (cudaErrorSystemNotReady): is nvidia-fabricmanager "
               "running?";
    case cudaErrorSystemDriverMismatch:
        return "the driver's kernel module and its libraries differ "
               "(cudaErrorSystemDriverMismatch): reboot after an update";
    default: return "the NVIDIA driver does not answer: see nvidia-smi";
    }
}

/* Why a GPU that answers cannot run the kernels of this file. */
const char *kernel_fault(cudaError_t e) {
    switch (e) {
    /* The build does not suit the GPU or the driver. */
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
        return "mixprec_cuda.cu was not compiled for this GPU: set nvcc's -arch (V100: sm_70, with "
               "CUDA 12; CUDA 13 has dropped it)";
    case cudaErrorUnsupportedPtxVersion:
        return "the NVIDIA driver is older than the PTX of this build "
               "(cudaErrorUnsupportedPtxVersion): update the driver, or compile with -arch of this "
               "GPU";
    case cudaErrorInvalidPtx:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
        return "the driver cannot compile the PTX of this build: compile with -arch of this GPU";

    /* Other programs use the GPU. */
    case cudaErrorMemoryAllocation:
        return "the GPU has no free memory: see nvidia-smi for the programs that use it";
    case cudaErrorDevicesUnavailable:
        return "another program uses the GPU (cudaErrorDevicesUnavailable), or the GPU is in "
               "exclusive or prohibited mode: see nvidia-smi";
    default: return "the GPU cannot be used: see nvidia-smi and dmesg";
    }
}

/* NULL when GPU `ordinal` can be used, or why it cannot. */
const char *why_unusable(int ordinal) {
    /* Does the driver answer, and does it know the GPU? */
    int driver = 0, count = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return "no NVIDIA driver is installed";
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count == 0) e = cudaErrorNoDevice;
    if (e != cudaSuccess) return driver_fault(e);
    if (ordinal < 0 || ordinal >= count) return "there is no GPU with this ordinal";
    if (ordinal >= most_devices) return "only the first 16 GPUs can be used";

    /* Is the GPU new enough? */
    int capability = 0;
    e = capability_of(ordinal, &capability);
    if (e != cudaSuccess) return "the GPU does not answer: see nvidia-smi";
    if (capability < 70) return "the GPU is too old: compute capability 7.0 (V100) is needed";

    /* Does it load a kernel of this file? */
    OnDevice on(ordinal);
    cudaFuncAttributes attributes;
    e = on.error;
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, (const void *)set_later);
    return e == cudaSuccess ? NULL : kernel_fault(e);
}

/* What makes this build slow on the usable GPU `ordinal`, or "". */
const char *why_slow(int ordinal) {
#ifndef MIXPREC_CUDASIM
    int capability = 0;
    OnDevice on(ordinal);
    if (on.error == cudaSuccess && capability_of(ordinal, &capability) == cudaSuccess &&
        capability == 90 && !has_group_code())
        return "slow: mixprec_cuda.cu was compiled without sm_90a, so attention takes 1.5 times "
               "as long on this GPU: compile it with -gencode arch=compute_90a,code=sm_90a";
#endif
    (void)ordinal;
    return "";
}

}   /* namespace */

extern "C" const mixp_device *mixp_cuda(int ordinal, const char **why) {
    const char *reason = why_unusable(ordinal);
    if (reason) cudaGetLastError(); /* clears the error of this query for the program */
    if (why) *why = reason ? reason : why_slow(ordinal);
    return reason ? NULL : &device_table[ordinal];
}
