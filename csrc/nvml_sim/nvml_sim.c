/* Answers NVML as a healthy driver would, except for what the state file says is different.
 *
 * Only what nvrx-slurm asks is there; NVIDIA's Python binding says "function not found" of all else. Nothing is
 * remembered between calls but that the library was initialised, so threads need no lock.
 */
#include "nvml_sim.h"
#include "state.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum {
    MOST_GPUS = 64,
    MOST_LINKS = 36,
    MOST_TEXT = 256,
    FIELD_LINK_RECEIVE_ERRORS = 208,
    FIELD_LINK_RECOVERY_EVENTS = 215,
    FIELD_RECOVERY_ACTION = 230,
    FIELD_LINK_RETRY_BLOCKS = 295,
    MEMORY_V2 = 0x02000028,
    FABRIC_V2 = 0x02000024,
    FABRIC_COMPLETED = 3
};
static const unsigned long long MEMORY_TOTAL_MIB = 81920, MIB = 1024 * 1024;

static atomic_int initialised;
/* A handle is the address of its GPU's place in here. */
static char handles[MOST_GPUS];

static nvmlDevice_t handle_of(unsigned int gpu) { return (nvmlDevice_t)(void *)(handles + gpu); }

/* One call: the state as it is now, and which GPU it is about. */
struct call {
    struct state state;
    unsigned int gpu;
};

/* What the state file has for this call: an error to give, or `hang`. */
static nvmlReturn_t told_to(const char *text) {
    if (strcmp(text, "hang") == 0) {
        for (;;) {
            pause();
        }
    }
    unsigned long long code;
    return parse_number(text, &code) && code < 100000 ? (nvmlReturn_t)code : NVML_ERROR_UNKNOWN;
}

static nvmlReturn_t read_state(struct call *call, const char *function) {
    switch (state_read(&call->state)) {
    case STATE_MISSING:
        return NVML_ERROR_DRIVER_NOT_LOADED;
    case STATE_DAMAGED:
        return NVML_ERROR_UNKNOWN;
    case STATE_READ:
        break;
    }
    char text[MOST_TEXT];
    bool told = state_text(&call->state, text, sizeof text, "error.%s", function);
    return told ? told_to(text) : NVML_SUCCESS;
}

static nvmlReturn_t begin(struct call *call, const char *function) {
    return atomic_load(&initialised) > 0 ? read_state(call, function) : NVML_ERROR_UNINITIALIZED;
}

static nvmlReturn_t number(const struct call *call, const char *key, unsigned long long usual,
                           unsigned long long *value) {
    *value = usual;
    return state_number(&call->state, value, "gpu.%u.%s", call->gpu, key) ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

static nvmlReturn_t small_number(const struct call *call, const char *key, unsigned int usual,
                                 unsigned int *value) {
    unsigned long long found;
    nvmlReturn_t code = number(call, key, usual, &found);
    *value = (unsigned int)found;
    return code;
}

static nvmlReturn_t gpu_count(const struct call *call, unsigned int *count) {
    unsigned long long found = 0;
    if (!state_number(&call->state, &found, "gpus") || found > MOST_GPUS) {
        return NVML_ERROR_UNKNOWN;
    }
    *count = (unsigned int)found;
    return NVML_SUCCESS;
}

/* Whether the GPU's slot is empty: the driver did not list it when it was loaded. */
static nvmlReturn_t is_gone(struct call *call, unsigned int gpu, bool *gone) {
    unsigned long long found;
    call->gpu = gpu;
    nvmlReturn_t code = number(call, "gone", 0, &found);
    *gone = found != 0;
    return code;
}

/* Whether the GPU answers at all. */
static nvmlReturn_t begin_gpu(struct call *call, const char *function) {
    char text[MOST_TEXT];
    if (state_text(&call->state, text, sizeof text, "gpu.%u.error.%s", call->gpu, function)) {
        return told_to(text);
    }
    unsigned long long lost;
    nvmlReturn_t code = number(call, "lost", 0, &lost);
    return code == NVML_SUCCESS && lost != 0 ? NVML_ERROR_GPU_IS_LOST : code;
}

static nvmlReturn_t begin_device(struct call *call, const char *function, nvmlDevice_t device) {
    nvmlReturn_t code = begin(call, function);
    unsigned int count = 0;
    if (code != NVML_SUCCESS || (code = gpu_count(call, &count)) != NVML_SUCCESS) {
        return code;
    }
    const char *handle = (const char *)device;
    if (handle < handles || handle >= handles + count) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    bool gone;
    code = is_gone(call, (unsigned int)(handle - handles), &gone);
    if (code == NVML_SUCCESS && gone) {
        code = NVML_ERROR_INVALID_ARGUMENT;
    }
    return code == NVML_SUCCESS ? begin_gpu(call, function) : code;
}

static nvmlReturn_t one_number(nvmlDevice_t device, const char *function, const char *key, unsigned int usual,
                               unsigned int *value) {
    struct call call;
    nvmlReturn_t code = begin_device(&call, function, device);
    return code == NVML_SUCCESS ? small_number(&call, key, usual, value) : code;
}

static nvmlReturn_t one_large_number(nvmlDevice_t device, const char *function, const char *key,
                                     unsigned long long usual, unsigned long long *value) {
    struct call call;
    nvmlReturn_t code = begin_device(&call, function, device);
    return code == NVML_SUCCESS ? number(&call, key, usual, value) : code;
}

static nvmlReturn_t copy(const char *text, char *target, unsigned int size) {
    if (strlen(text) >= size) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    strcpy(target, text);
    return NVML_SUCCESS;
}

/* ── The library and its GPUs ─────────────────────────────────────────────────────────────────────────── */

EXPORTED nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    struct call call;
    nvmlReturn_t code = read_state(&call, "nvmlInit");
    if (code == NVML_SUCCESS) {
        atomic_fetch_add(&initialised, 1);
    }
    return code;
}

EXPORTED nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORTED nvmlReturn_t nvmlShutdown(void) {
    int before = atomic_load(&initialised);
    while (before > 0 && !atomic_compare_exchange_weak(&initialised, &before, before - 1)) {
    }
    return before > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

EXPORTED const char *nvmlErrorString(nvmlReturn_t code) {
    return code == NVML_SUCCESS ? "Success" : "Simulated error";
}

EXPORTED nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    struct call call;
    char text[MOST_TEXT];
    nvmlReturn_t code = begin(&call, "nvmlSystemGetDriverVersion");
    if (code != NVML_SUCCESS) {
        return code;
    }
    bool told = state_text(&call.state, text, sizeof text, "driver");
    return told ? copy(text, version, size) : NVML_ERROR_UNKNOWN;
}

/* Which slots are not empty, in order: NVML's indexes. */
static nvmlReturn_t list_gpus(struct call *call, unsigned int *gpus, unsigned int *count) {
    unsigned int slots;
    nvmlReturn_t code = gpu_count(call, &slots);
    *count = 0;
    for (unsigned int gpu = 0; code == NVML_SUCCESS && gpu < slots; gpu++) {
        bool gone;
        code = is_gone(call, gpu, &gone);
        if (code == NVML_SUCCESS && !gone) {
            gpus[(*count)++] = gpu;
        }
    }
    return code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    struct call call;
    nvmlReturn_t code = begin(&call, "nvmlDeviceGetCount");
    unsigned int gpus[MOST_GPUS];
    return code == NVML_SUCCESS ? list_gpus(&call, gpus, count) : code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    struct call call;
    unsigned int gpus[MOST_GPUS], count;
    nvmlReturn_t code = begin(&call, "nvmlDeviceGetHandleByIndex");
    if (code == NVML_SUCCESS) {
        code = list_gpus(&call, gpus, &count);
    }
    if (code == NVML_SUCCESS && index >= count) {
        code = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (code != NVML_SUCCESS) {
        return code;
    }
    call.gpu = gpus[index];
    *device = handle_of(call.gpu);
    return begin_gpu(&call, "nvmlDeviceGetHandleByIndex");
}

EXPORTED nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    struct call call;
    unsigned int gpus[MOST_GPUS], count = 0;
    nvmlReturn_t code = begin(&call, "nvmlDeviceGetHandleByUUID");
    if (code == NVML_SUCCESS) {
        code = list_gpus(&call, gpus, &count);
    }
    for (unsigned int index = 0; code == NVML_SUCCESS && index < count; index++) {
        char text[MOST_TEXT];
        call.gpu = gpus[index];
        if (state_text(&call.state, text, sizeof text, "gpu.%u.uuid", call.gpu) && strcmp(text, uuid) == 0) {
            *device = handle_of(call.gpu);
            return begin_gpu(&call, "nvmlDeviceGetHandleByUUID");
        }
    }
    return code == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int size) {
    struct call call;
    char text[MOST_TEXT];
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetUUID", device);
    if (code != NVML_SUCCESS) {
        return code;
    }
    bool told = state_text(&call.state, text, sizeof text, "gpu.%u.uuid", call.gpu);
    return told ? copy(text, uuid, size) : NVML_ERROR_UNKNOWN;
}

EXPORTED nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    struct call call;
    char text[MOST_TEXT];
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetPciInfo", device);
    if (code != NVML_SUCCESS) {
        return code;
    }
    memset(pci, 0, sizeof *pci);
    if (!state_text(&call.state, text, sizeof text, "gpu.%u.pci", call.gpu) ||
        sscanf(text, "%4x:%2x:%2x.0", &pci->domain, &pci->bus, &pci->device) != 3) {
        return NVML_ERROR_UNKNOWN;
    }
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF,
             pci->bus & 0xFF, pci->device & 0xFF);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus & 0xFF, pci->device & 0xFF);
    return NVML_SUCCESS;
}

/* ── Memory errors, clocks, the PCIe link ─────────────────────────────────────────────────────────────── */

EXPORTED nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int type, unsigned int counter,
                                                  unsigned long long *count) {
    (void)counter;
    return one_large_number(device, "nvmlDeviceGetTotalEccErrors", type == 1 ? "ecc" : "ecc_corrected", 0, count);
}

EXPORTED nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected,
                                                unsigned int *uncorrected, unsigned int *pending,
                                                unsigned int *failed) {
    struct call call;
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetRemappedRows", device);
    *corrected = *uncorrected = *pending = 0;
    if (code == NVML_SUCCESS) {
        code = small_number(&call, "row_remap_pending", 0, pending);
    }
    return code == NVML_SUCCESS ? small_number(&call, "row_remap_failed", 0, failed) : code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, unsigned int *pending) {
    return one_number(device, "nvmlDeviceGetRetiredPagesPendingStatus", "retired_pending", 0, pending);
}

EXPORTED nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device,
                                                                unsigned long long *reasons) {
    /* 1: the clocks are low because the GPU is idle. */
    return one_large_number(device, "nvmlDeviceGetCurrentClocksThrottleReasons", "throttle", 1, reasons);
}

EXPORTED nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation) {
    return one_number(device, "nvmlDeviceGetCurrPcieLinkGeneration", "pcie_generation", 5, generation);
}

EXPORTED nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation) {
    return one_number(device, "nvmlDeviceGetMaxPcieLinkGeneration", "pcie_max_generation", 5, generation);
}

EXPORTED nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *width) {
    return one_number(device, "nvmlDeviceGetCurrPcieLinkWidth", "pcie_width", 16, width);
}

EXPORTED nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned int *width) {
    return one_number(device, "nvmlDeviceGetMaxPcieLinkWidth", "pcie_max_width", 16, width);
}

/* ── Who uses the GPU ─────────────────────────────────────────────────────────────────────────────────── */

EXPORTED nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    rates->memory = 0;
    return one_number(device, "nvmlDeviceGetUtilizationRates", "utilization", 0, &rates->gpu);
}

/* `processes PID:MIB PID:MIB …`: store the first `room` of them; give how many there are, and their memory. */
static bool processes(const struct call *call, nvmlProcessInfo_t *found, unsigned int room, unsigned int *count,
                      unsigned long long *mib) {
    char text[4096];
    *count = 0;
    *mib = 0;
    if (!state_text(&call->state, text, sizeof text, "gpu.%u.processes", call->gpu)) {
        return true;
    }
    char *rest = text;
    for (const char *word; (word = strsep(&rest, " ")) != NULL; ++*count) {
        unsigned int pid, used;
        int length = 0;
        if (sscanf(word, "%9u:%9u%n", &pid, &used, &length) != 2 || word[length] != '\0') {
            return false;
        }
        *mib += used;
        if (*count < room) {
            found[*count] = (nvmlProcessInfo_t){pid, used * MIB, 0xFFFFFFFF, 0xFFFFFFFF};
        }
    }
    return true;
}

EXPORTED nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                              nvmlProcessInfo_t *found) {
    struct call call;
    unsigned int room = found != NULL ? *count : 0;
    unsigned long long mib;
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetComputeRunningProcesses", device);
    if (code != NVML_SUCCESS) {
        return code;
    }
    if (!processes(&call, found, room, count, &mib)) {
        return NVML_ERROR_UNKNOWN;
    }
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t memory(nvmlDevice_t device, unsigned long long *used_mib) {
    struct call call;
    unsigned int count;
    unsigned long long of_processes;
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetMemoryInfo", device);
    if (code == NVML_SUCCESS) {
        code = number(&call, "memory_used_mib", 0, used_mib);
    }
    if (code != NVML_SUCCESS || !processes(&call, NULL, 0, &count, &of_processes)) {
        return code != NVML_SUCCESS ? code : NVML_ERROR_UNKNOWN;
    }
    *used_mib += of_processes;
    return *used_mib <= MEMORY_TOTAL_MIB ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

EXPORTED nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info) {
    unsigned long long used;
    nvmlReturn_t code = memory(device, &used);
    if (code == NVML_SUCCESS) {
        *info = (nvmlMemory_t){MEMORY_TOTAL_MIB * MIB, (MEMORY_TOTAL_MIB - used) * MIB, used * MIB};
    }
    return code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info) {
    unsigned long long used;
    if (info->version != MEMORY_V2) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t code = memory(device, &used);
    if (code == NVML_SUCCESS) {
        *info = (nvmlMemory_v2_t){MEMORY_V2, MEMORY_TOTAL_MIB * MIB, 0, (MEMORY_TOTAL_MIB - used) * MIB, used * MIB};
    }
    return code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    nvmlReturn_t code = one_number(device, "nvmlDeviceGetMigMode", "mig", 0, current);
    *pending = *current;
    return code;
}

/* ── Fabric and NVLinks ───────────────────────────────────────────────────────────────────────────────── */

/* Usually registered with the NVSwitches of the node, and in no domain beyond it: a UUID of zeros. */
static nvmlReturn_t fabric(nvmlDevice_t device, const char *function, nvmlGpuFabricInfo_t *info) {
    struct call call;
    unsigned int state = 0, status = 0;
    char uuid[MOST_TEXT];
    memset(info, 0, sizeof *info);
    nvmlReturn_t code = begin_device(&call, function, device);
    if (code == NVML_SUCCESS) {
        code = small_number(&call, "fabric_state", FABRIC_COMPLETED, &state);
    }
    if (code == NVML_SUCCESS) {
        code = small_number(&call, "fabric_status", NVML_SUCCESS, &status);
    }
    if (code == NVML_SUCCESS) {
        code = small_number(&call, "fabric_clique", 0, &info->cliqueId);
    }
    info->state = (unsigned char)state;
    info->status = (nvmlReturn_t)status;
    if (code == NVML_SUCCESS && state_text(&call.state, uuid, sizeof uuid, "gpu.%u.fabric_uuid", call.gpu)) {
        if (strlen(uuid) != 2 * sizeof info->clusterUuid || strspn(uuid, "0123456789abcdef") != strlen(uuid)) {
            return NVML_ERROR_UNKNOWN;
        }
        for (size_t i = 0; i < sizeof info->clusterUuid; i++) {
            sscanf(uuid + 2 * i, "%2hhx", &info->clusterUuid[i]);
        }
    }
    return code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    return fabric(device, "nvmlDeviceGetGpuFabricInfo", info);
}

EXPORTED nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info) {
    if (info->version != FABRIC_V2) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlGpuFabricInfo_t found;
    nvmlReturn_t code = fabric(device, "nvmlDeviceGetGpuFabricInfoV", &found);
    *info = (nvmlGpuFabricInfo_v2_t){
        .version = FABRIC_V2, .status = found.status, .cliqueId = found.cliqueId, .state = found.state};
    memcpy(info->clusterUuid, found.clusterUuid, sizeof info->clusterUuid);
    return code;
}

/* Whether the GPU has the link at all. */
static nvmlReturn_t require_link(const struct call *call, unsigned int link) {
    unsigned long long links = 0;
    if (!state_number(&call->state, &links, "links") || links > MOST_LINKS) {
        return NVML_ERROR_UNKNOWN;
    }
    if (links == 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return link < links ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t of_link(const struct call *call, unsigned int link, const char *key, unsigned int usual,
                            unsigned long long *value) {
    char whole[MOST_TEXT];
    nvmlReturn_t code = require_link(call, link);
    snprintf(whole, sizeof whole, "link.%u.%s", link, key);
    return code == NVML_SUCCESS ? number(call, whole, usual, value) : code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active) {
    struct call call;
    unsigned long long up = 0;
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetNvLinkState", device);
    if (code == NVML_SUCCESS) {
        code = of_link(&call, link, "up", 1, &up);
    }
    *active = up != 0;
    return code;
}

EXPORTED nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link,
                                                      unsigned int counter, unsigned long long *count) {
    static const char *const NAMES[] = {"replay", "recovery", "crc"};
    struct call call;
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetNvLinkErrorCounter", device);
    if (code != NVML_SUCCESS) {
        return code;
    }
    return counter < 3 ? of_link(&call, link, NAMES[counter], 0, count) : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t field(const struct call *call, unsigned int id, unsigned int scope, nvmlFieldValue_t *value) {
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    switch (id) {
    case FIELD_RECOVERY_ACTION:
        value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        return small_number(call, "recovery_action", 0, &value->value.uiVal);
    case FIELD_LINK_RECEIVE_ERRORS:
        return of_link(call, scope, "receive", 0, &value->value.ullVal);
    case FIELD_LINK_RECOVERY_EVENTS:
        return of_link(call, scope, "recovery", 0, &value->value.ullVal);
    case FIELD_LINK_RETRY_BLOCKS:
        return of_link(call, scope, "retry", 0, &value->value.ullVal);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

EXPORTED nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    struct call call;
    nvmlReturn_t code = begin_device(&call, "nvmlDeviceGetFieldValues", device);
    for (int i = 0; code == NVML_SUCCESS && i < count; i++) {
        char text[MOST_TEXT];
        values[i].timestamp = values[i].latencyUsec = 0;
        values[i].value.ullVal = 0;
        bool told = state_text(&call.state, text, sizeof text, "gpu.%u.field.%u", call.gpu, values[i].fieldId) ||
                    state_text(&call.state, text, sizeof text, "field.%u", values[i].fieldId);
        values[i].nvmlReturn = told ? told_to(text)
                                    : field(&call, values[i].fieldId, values[i].scopeId, &values[i]);
    }
    return code;
}
