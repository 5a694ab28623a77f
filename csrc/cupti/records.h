// From raw buffers to the aggregator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "aggregator.h"

namespace nvrx {

// A source of records: how the records of one of its buffers follow each other.
class RecordSource {
public:
    virtual ~RecordSource() = default;
    // The record after `previous`, the first one after nullptr; nullptr at the end.
    virtual const abi::Record* next(std::uint8_t* buffer, std::size_t size, const abi::Record* previous) const = 0;
    // Records lost since the last call because no buffer was to be had.
    virtual std::uint64_t dropped() const { return 0; }
    // Buffers since the last call of which the records could be read only up to one that makes no sense.
    virtual std::uint64_t unreadable() const { return 0; }
};

// Records that lie at a fixed distance from each other, as tests and benchmarks write them.
class EvenlySpaced final : public RecordSource {
public:
    explicit EvenlySpaced(std::size_t distance) : distance_(distance) {}

    const abi::Record* next(std::uint8_t* buffer, std::size_t size, const abi::Record* previous) const override {
        const std::uint8_t* place =
            previous == nullptr ? buffer : reinterpret_cast<const std::uint8_t*>(previous) + distance_;
        const std::size_t left = size - static_cast<std::size_t>(place - buffer);
        return left < distance_ || left > size ? nullptr : reinterpret_cast<const abi::Record*>(place);
    }

private:
    std::size_t distance_;
};

// Hands all records of a buffer to `aggregator`. Kinds that nobody has asked for are counted, for another tool may
// have asked for them.
inline void read_records(const RecordSource& source, std::uint8_t* buffer, std::size_t size, Aggregator& aggregator) {
    const abi::Record* record = nullptr;
    while ((record = source.next(buffer, size, record)) != nullptr) {
        switch (record->kind) {
            case abi::kKindKernel:
            case abi::kKindConcurrentKernel: {
                const auto* kernel = reinterpret_cast<const abi::Kernel*>(record);
                aggregator.kernel(kernel->name, kernel->start, kernel->end, kernel->correlation);
                break;
            }
            case abi::kKindExternalCorrelation: {
                const auto* external = reinterpret_cast<const abi::External*>(record);
                // Those of torch.profiler are none of ours.
                if (external->external_kind == abi::kExternalKind) {
                    aggregator.correlated(external->correlation, external->external_id);
                }
                break;
            }
            case abi::kKindDriver:
            case abi::kKindRuntime: {
                const auto* call = reinterpret_cast<const abi::Api*>(record);
                aggregator.launched(call->correlation, call->start);
                break;
            }
            default:
                aggregator.unknown();
        }
    }
}

}  // namespace nvrx
