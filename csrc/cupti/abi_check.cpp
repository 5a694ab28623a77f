// Compares abi.h with CUPTI's own headers; built only where they are found.
#include <cupti.h>

#include "abi.h"

namespace {

using namespace nvrx::abi;

#define NVRX_SAME(ours, field, theirs, member) \
    static_assert(offsetof(ours, field) == offsetof(theirs, member), #theirs "." #member);
#define NVRX_SAME_KERNEL(theirs)                               \
    NVRX_SAME(Kernel, kind, theirs, kind)                      \
    NVRX_SAME(Kernel, start, theirs, start)                    \
    NVRX_SAME(Kernel, end, theirs, end)                        \
    NVRX_SAME(Kernel, completed, theirs, completed)            \
    NVRX_SAME(Kernel, device, theirs, deviceId)                \
    NVRX_SAME(Kernel, context, theirs, contextId)              \
    NVRX_SAME(Kernel, stream, theirs, streamId)                \
    NVRX_SAME(Kernel, grid, theirs, gridX)                     \
    NVRX_SAME(Kernel, block, theirs, blockX)                   \
    NVRX_SAME(Kernel, correlation, theirs, correlationId)      \
    NVRX_SAME(Kernel, grid_id, theirs, gridId)                 \
    NVRX_SAME(Kernel, name, theirs, name)                      \
    static_assert(sizeof(theirs) >= sizeof(Kernel));

NVRX_SAME_KERNEL(CUpti_ActivityKernel5)
NVRX_SAME_KERNEL(CUpti_ActivityKernel6)
NVRX_SAME_KERNEL(CUpti_ActivityKernel7)
#if CUDA_VERSION >= 11080
NVRX_SAME_KERNEL(CUpti_ActivityKernel8)
#endif
#if CUDA_VERSION >= 12000
NVRX_SAME_KERNEL(CUpti_ActivityKernel9)
#endif
#if CUPTI_API_VERSION >= 130000
NVRX_SAME_KERNEL(CUpti_ActivityKernel10)
#endif

NVRX_SAME(Api, kind, CUpti_ActivityAPI, kind)
NVRX_SAME(Api, call, CUpti_ActivityAPI, cbid)
NVRX_SAME(Api, start, CUpti_ActivityAPI, start)
NVRX_SAME(Api, end, CUpti_ActivityAPI, end)
NVRX_SAME(Api, process, CUpti_ActivityAPI, processId)
NVRX_SAME(Api, thread, CUpti_ActivityAPI, threadId)
NVRX_SAME(Api, correlation, CUpti_ActivityAPI, correlationId)
static_assert(sizeof(CUpti_ActivityAPI) == sizeof(Api));

NVRX_SAME(External, kind, CUpti_ActivityExternalCorrelation, kind)
NVRX_SAME(External, external_kind, CUpti_ActivityExternalCorrelation, externalKind)
NVRX_SAME(External, external_id, CUpti_ActivityExternalCorrelation, externalId)
NVRX_SAME(External, correlation, CUpti_ActivityExternalCorrelation, correlationId)
static_assert(sizeof(CUpti_ActivityExternalCorrelation) == sizeof(External));

static_assert(static_cast<int>(kKindKernel) == static_cast<int>(CUPTI_ACTIVITY_KIND_KERNEL));
static_assert(static_cast<int>(kKindDriver) == static_cast<int>(CUPTI_ACTIVITY_KIND_DRIVER));
static_assert(static_cast<int>(kKindRuntime) == static_cast<int>(CUPTI_ACTIVITY_KIND_RUNTIME));
static_assert(static_cast<int>(kKindConcurrentKernel) == static_cast<int>(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
static_assert(static_cast<int>(kKindExternalCorrelation) == static_cast<int>(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION));
static_assert(kExternalKind == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM2);
static_assert(static_cast<int>(kSuccess) == static_cast<int>(CUPTI_SUCCESS));
static_assert(static_cast<int>(kEndOfBuffer) == static_cast<int>(CUPTI_ERROR_MAX_LIMIT_REACHED));
static_assert(static_cast<int>(kMultipleSubscribers) == static_cast<int>(CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED));
static_assert(kRuntimeLaunches[0] == CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000);
static_assert(kRuntimeLaunches[5] == CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000);
static_assert(kRuntimeLaunches[7] == CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_v11060);
static_assert(kDriverLaunches[0] == CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel);
static_assert(kDriverLaunches[5] == CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch);
static_assert(kDriverLaunches[7] == CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx);
static_assert(CUPTI_API_VERSION < kFirstUnknownVersion);

}  // namespace
