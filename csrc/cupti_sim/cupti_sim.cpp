// A libcupti without a GPU: keeps CUPTI's rules on callbacks, buffers and correlation, and has kernels "launched" by
// sim_launch. For tests; what a real one does beyond that (clocks, contexts, graphs as such) is not here.
#include <cstdint>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../cupti/abi.h"

using namespace nvrx::abi;

namespace {

constexpr int kInvalid = 1, kNotInitialized = 15, kQueueEmpty = 20, kInvalidKind = 21;
constexpr std::size_t kKernelBytes = 216, kOtherBytes = 64;  // CUpti_ActivityKernel10; any other kind

struct Filling {
    std::uint8_t* buffer = nullptr;
    std::size_t size = 0, used = 0;
};

// Never destroyed: at the end of a process its threads may still launch.
std::recursive_mutex& mutex = *new std::recursive_mutex;
RequestBuffer request = nullptr;
BufferComplete complete = nullptr;
Timestamp clock_of_user = nullptr;
using Numbers = std::set<std::uint32_t>;
Numbers &kinds = *new Numbers, &runtime_calls = *new Numbers, &driver_calls = *new Numbers;
Filling of_host, of_device;
using Named = std::map<std::string, long>;
Named& settings = *new Named{{"version", 130000}, {"correlation", 1}};
Named& calls = *new Named;
std::size_t dropped = 0;
thread_local std::map<std::uint32_t, std::vector<std::uint64_t>> external;

std::uint64_t now() {
    if (clock_of_user != nullptr) return clock_of_user();
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1000000000u + static_cast<std::uint64_t>(time.tv_nsec);
}

std::size_t size_of(std::uint32_t kind) {
    switch (kind) {
        case kKindKernel:
        case kKindConcurrentKernel: return kKernelBytes;
        case kKindDriver:
        case kKindRuntime: return sizeof(Api);
        case kKindExternalCorrelation: return sizeof(External);
        default: return kOtherBytes;
    }
}

void hand_over(Filling& filling) {
    if (filling.buffer == nullptr) return;
    const Filling full = filling;
    filling = {};
    complete(nullptr, 0, full.buffer, full.size, full.used);
}

void write(Filling& filling, const void* record, std::size_t used, std::size_t size) {
    if (filling.buffer != nullptr && filling.size - filling.used < size) hand_over(filling);
    if (filling.buffer == nullptr) {
        std::size_t most = 0;
        request(&filling.buffer, &filling.size, &most);
        if (filling.buffer == nullptr || filling.size < size) {
            ++dropped;
            return;
        }
    }
    std::memset(filling.buffer + filling.used, 0, size);
    std::memcpy(filling.buffer + filling.used, record, used);
    filling.used += size;
}

int fails(const char* call) {
    const std::lock_guard lock(mutex);
    ++calls[call];
    const auto found = settings.find(std::string("fail:") + call);
    return found == settings.end() ? kSuccess : static_cast<int>(found->second);
}

}  // namespace

extern "C" {

int cuptiGetVersion(std::uint32_t* version) {
    *version = static_cast<std::uint32_t>(settings["version"]);
    return kSuccess;
}

int cuptiGetResultString(int result, const char** text) {
    static const std::map<int, const char*> texts = {{kInvalid, "CUPTI_ERROR_INVALID_PARAMETER"},
                                                     {kNotInitialized, "CUPTI_ERROR_NOT_INITIALIZED"},
                                                     {kMultipleSubscribers, "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS"}};
    const auto found = texts.find(result);
    if (found == texts.end()) return kInvalid;
    *text = found->second;
    return kSuccess;
}

int cuptiGetTimestamp(std::uint64_t* time) {
    *time = now();
    return kSuccess;
}

int cuptiSubscribe(void** subscriber, void*, void*) {
    *subscriber = &calls;
    return fails("cuptiSubscribe");
}

int cuptiUnsubscribe(void*) { return fails("cuptiUnsubscribe"); }

int cuptiFinalize() { return fails("cuptiFinalize"); }

int cuptiActivityRegisterCallbacks(RequestBuffer requested, BufferComplete completed) {
    const std::lock_guard lock(mutex);
    request = requested;
    complete = completed;
    return fails("cuptiActivityRegisterCallbacks");
}

int cuptiActivityRegisterTimestampCallback(Timestamp function) {
    const std::lock_guard lock(mutex);
    clock_of_user = function;
    return fails("cuptiActivityRegisterTimestampCallback");
}

int cuptiActivityEnable(std::uint32_t kind) {
    const std::lock_guard lock(mutex);
    kinds.insert(kind);
    return fails("cuptiActivityEnable");
}

int cuptiActivityDisable(std::uint32_t kind) {
    const std::lock_guard lock(mutex);
    kinds.erase(kind);
    return fails("cuptiActivityDisable");
}

int cuptiActivityEnableRuntimeApi(std::uint32_t call, std::uint8_t enable) {
    const std::lock_guard lock(mutex);
    enable ? (void)runtime_calls.insert(call) : (void)runtime_calls.erase(call);
    return kSuccess;
}

int cuptiActivityEnableDriverApi(std::uint32_t call, std::uint8_t enable) {
    const std::lock_guard lock(mutex);
    enable ? (void)driver_calls.insert(call) : (void)driver_calls.erase(call);
    return kSuccess;
}

int cuptiActivityFlushAll(std::uint32_t) {
    const std::lock_guard lock(mutex);
    if (const int result = fails("cuptiActivityFlushAll")) return result;
    hand_over(of_device);  // before the launches that they belong to, as it may happen
    hand_over(of_host);
    return kSuccess;
}

int cuptiActivityGetNextRecord(std::uint8_t* buffer, std::size_t valid, const Record** record) {
    const std::uint8_t* place =
        *record == nullptr ? buffer : reinterpret_cast<const std::uint8_t*>(*record) + size_of((*record)->kind);
    const std::size_t used = static_cast<std::size_t>(place - buffer);
    if (used + sizeof(Record) > valid) return kEndOfBuffer;
    const auto* next = reinterpret_cast<const Record*>(place);
    if (next->kind == 0 || used + size_of(next->kind) > valid) return kInvalidKind;
    *record = next;
    return kSuccess;
}

int cuptiActivityGetNumDroppedRecords(void*, std::uint32_t, std::size_t* count) {
    const std::lock_guard lock(mutex);
    *count = dropped;
    dropped = 0;
    return kSuccess;
}

int cuptiActivityPushExternalCorrelationId(std::uint32_t kind, std::uint64_t id) {
    external[kind].push_back(id);
    return kSuccess;
}

int cuptiActivityPopExternalCorrelationId(std::uint32_t kind, std::uint64_t* last) {
    auto& stack = external[kind];
    if (stack.empty()) return kQueueEmpty;
    if (last != nullptr) *last = stack.back();
    stack.pop_back();
    return kSuccess;
}

// ── What tests call ───────────────────────────────────────────────────────────────────────────────

// "version", "correlation" (the next number), "fail:<call>" (the result of that call).
void sim_set(const char* key, long value) {
    const std::lock_guard lock(mutex);
    settings[key] = value;
}

// How often a call was made; "inside" is the depth of this thread's sections, "innermost" the last of them, 0 for none.
long sim_calls(const char* call) {
    const std::lock_guard lock(mutex);
    const auto& inside = external[kExternalKind];
    if (std::string(call) == "inside") return static_cast<long>(inside.size());
    if (std::string(call) == "innermost") return inside.empty() ? 0 : static_cast<long>(inside.back());
    return calls[call];
}

// 1 if kernels are recorded.
int sim_is_recording() {
    const std::lock_guard lock(mutex);
    return kinds.count(kKindConcurrentKernel) ? 1 : 0;
}

// Another tool takes CUPTI: its callbacks from now on, and a clock that counts in other units. Its buffers are dropped.
void sim_taken_over() {
    static std::uint8_t elsewhere[4096];
    const std::lock_guard lock(mutex);
    request = [](std::uint8_t** buffer, std::size_t* size, std::size_t* most) {
        *buffer = elsewhere;
        *size = sizeof elsewhere;
        *most = 0;
    };
    complete = [](void*, std::uint32_t, std::uint8_t*, std::size_t, std::size_t) {};
    clock_of_user = []() -> std::uint64_t { return 42; };
    kinds.insert(kKindConcurrentKernel);
}

// One call that launches `kernels` kernels (a CUDA graph, if more than one) of `ns` each. `call` is the runtime's
// number of it, or minus the driver's. `name` must outlive the process's interest in it, as CUPTI's names do.
void sim_launch(const char* name, std::uint64_t ns, int kernels, int call) {
    const std::lock_guard lock(mutex);
    if (kinds.count(kKindConcurrentKernel) == 0) return;
    const auto correlation = static_cast<std::uint32_t>(settings["correlation"]++);
    const std::uint64_t begun = now();
    const bool by_runtime = call >= 0;
    const bool is_recorded = by_runtime ? runtime_calls.count(static_cast<std::uint32_t>(call)) > 0 || kinds.count(kKindRuntime)
                                        : driver_calls.count(static_cast<std::uint32_t>(-call)) > 0 || kinds.count(kKindDriver);
    if (is_recorded) {
        if (kinds.count(kKindExternalCorrelation)) {
            for (const auto& [kind, stack] : external) {
                if (stack.empty()) continue;
                const External record{kKindExternalCorrelation, kind, stack.back(), correlation, 0};
                write(of_host, &record, sizeof record, sizeof record);
            }
        }
        const Api record{by_runtime ? kKindRuntime : kKindDriver, static_cast<std::uint32_t>(call < 0 ? -call : call),
                         begun, now(), 0, 0, correlation, 0};
        write(of_host, &record, sizeof record, sizeof record);
    }
    for (int i = 0; i < kernels; ++i) {
        Kernel record{};
        record.kind = kKindConcurrentKernel;
        record.start = begun + static_cast<std::uint64_t>(i) * ns;
        record.end = record.start + ns;
        record.correlation = correlation;
        record.name = name;
        write(of_device, &record, sizeof record, kKernelBytes);
    }
}

// A record of a kind that this project does not look at; 0: of none, so what follows it in its buffer can't be read.
void sim_other(std::uint32_t kind) {
    const std::lock_guard lock(mutex);
    const Record record{kind};
    write(of_device, &record, sizeof record, kOtherBytes);
}

}  // extern "C"
