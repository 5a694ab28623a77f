// nvrx_slurm.straggler._cupti: needs neither CUDA nor a GPU to be imported.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "activity.h"
#include "aggregator.h"
#include "collector.h"
#include "records.h"

namespace py = pybind11;

namespace nvrx {

namespace {

using Numbers = std::map<std::string, std::uint64_t>;

Numbers as_map(const Counts& counts) {
    return {{"kernels", counts.kernels},           {"launches", counts.launches},
            {"correlations", counts.correlations}, {"unknown", counts.unknown},
            {"untimed", counts.untimed},           {"unattributed", counts.unattributed},
            {"crowded_out", counts.crowded_out}};
}

Numbers as_map(const Collector& collector) {
    Numbers found = as_map(collector.counts());
    const Buffers buffers = collector.buffers();
    found["buffers"] = buffers.made;
    found["buffers_refused"] = buffers.refused;
    found["buffers_foreign"] = buffers.foreign;
    found["buffers_discarded"] = buffers.discarded;
    found["buffers_unreadable"] = buffers.unreadable;
    found["dropped"] = buffers.dropped;
    return found;
}

// Contiguous bytes of a Python object, for as long as this lives.
class Bytes {
public:
    explicit Bytes(const py::buffer& object) : info_(object.request()) {
        if (info_.ndim > 1 || (info_.ndim == 1 && info_.strides[0] != info_.itemsize)) {
            throw py::value_error("records lie one after the other in one array");
        }
        if (reinterpret_cast<std::uintptr_t>(info_.ptr) % alignof(std::uint64_t) != 0) {
            throw py::value_error("records are aligned to 8 bytes");
        }
    }
    std::uint8_t* data() const { return static_cast<std::uint8_t*>(info_.ptr); }
    std::size_t size() const { return static_cast<std::size_t>(info_.size * info_.itemsize); }

private:
    py::buffer_info info_;
};

std::size_t checked(std::size_t distance) {
    if (distance < sizeof(abi::Kernel) || distance % 8 != 0) {
        throw py::value_error("distance is " + std::to_string(distance) + ": multiples of 8 from 112 are accepted");
    }
    return distance;
}

// The aggregator alone, on the thread that calls it.
class SyntheticAggregator {
public:
    explicit SyntheticAggregator(std::size_t distance) : source_(checked(distance)), aggregator_(open_) {}

    void read(const py::buffer& records) {
        const Bytes bytes(records);
        const py::gil_scoped_release unlocked;
        read_records(source_, bytes.data(), bytes.size(), aggregator_);
    }
    std::vector<KernelTimes> take(bool is_last) { return aggregator_.take(is_last); }
    Numbers counts() const { return as_map(aggregator_.counts()); }
    std::size_t sketches() const { return aggregator_.sketches(); }
    std::uint64_t open(std::uint16_t section, std::uint64_t now) { return open_.open(section, now); }
    void close(std::uint64_t opened, std::uint64_t now) { open_.close(opened, now); }

private:
    OpenSections open_;
    EvenlySpaced source_;
    Aggregator aggregator_;
};

// Buffers, their reader thread and an aggregator, with records from Python instead of a driver.
class SyntheticCollector {
public:
    SyntheticCollector(std::size_t distance, std::size_t buffer_bytes, std::size_t most_buffers)
        : distance_(checked(distance)),
          process_(getpid()),
          collector_(new Collector(std::make_unique<EvenlySpaced>(distance), buffer_bytes, most_buffers)) {}
    ~SyntheticCollector() {
        if (getpid() == process_) delete collector_;
    }
    SyntheticCollector(const SyntheticCollector&) = delete;
    SyntheticCollector& operator=(const SyntheticCollector&) = delete;

    // Returns how many records found no buffer.
    std::size_t feed(const py::buffer& records) {
        const Bytes bytes(records);
        const py::gil_scoped_release unlocked;
        std::size_t lost = 0, size = 0;
        for (std::size_t at = 0; at < bytes.size();) {
            std::uint8_t* buffer = collector_->request(size);
            if (buffer == nullptr || size < distance_) {
                lost += (bytes.size() - at) / distance_;
                break;
            }
            const std::size_t part = std::min(size / distance_ * distance_, bytes.size() - at);
            std::memcpy(buffer, bytes.data() + at, part);
            collector_->complete(buffer, part);
            at += part;
        }
        return lost;
    }
    void complete_foreign(const py::buffer& records) {
        const Bytes bytes(records);
        collector_->complete(bytes.data(), bytes.size());
    }
    bool drain(int patience_ms) { return collector_->drain(std::chrono::milliseconds(patience_ms)); }
    std::vector<KernelTimes> take() { return collector_->take(true); }
    Numbers counts() const { return as_map(*collector_); }

private:
    std::size_t distance_;
    int process_;
    Collector* collector_;  // stays where it is in a fork, which can't end its thread
};

}  // namespace

PYBIND11_MODULE(_cupti, module) {
    module.doc() = "Statistics of GPU kernels, from CUPTI's activity records or from synthetic ones.";
    module.attr("SKETCH_BYTES") = sizeof(Sketch);
    module.attr("RELATIVE_ERROR") = Sketch::kRelativeError;
    module.attr("MOST_SKETCHES") = Aggregator::kMostSketches;
#ifdef NVRX_CUPTI_HEADERS
    module.attr("CHECKED_AGAINST") = NVRX_CUPTI_HEADERS;
#else
    module.attr("CHECKED_AGAINST") = "";
#endif
    module.def("hash_name", [](const std::string& name) { return hash_name(name); });

    py::class_<Times>(module, "Times")
        .def_readonly("min_us", &Times::min_us)
        .def_readonly("max_us", &Times::max_us)
        .def_readonly("median_us", &Times::median_us)
        .def_readonly("mean_us", &Times::mean_us)
        .def_readonly("deviation_us", &Times::deviation_us)
        .def_readonly("count", &Times::count)
        .def_readonly("coarse", &Times::coarse);
    py::class_<KernelTimes>(module, "KernelTimes")
        .def_readonly("name", &KernelTimes::name)
        .def_readonly("hash", &KernelTimes::hash)
        .def_readonly("times", &KernelTimes::times)
        .def_readonly("sections", &KernelTimes::sections);

    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<SyntheticAggregator>(module, "SyntheticAggregator")
        .def(py::init<std::size_t>(), py::arg("distance"))
        .def("read", &SyntheticAggregator::read)
        .def("take", &SyntheticAggregator::take, py::arg("is_last") = true)
        .def("counts", &SyntheticAggregator::counts)
        .def("sketches", &SyntheticAggregator::sketches)
        .def("open", &SyntheticAggregator::open)
        .def("close", &SyntheticAggregator::close);
    py::class_<SyntheticCollector>(module, "SyntheticCollector")
        .def(py::init<std::size_t, std::size_t, std::size_t>(), py::arg("distance"),
             py::arg("buffer_bytes") = Collector::kBufferBytes, py::arg("most_buffers") = Collector::kMostBuffers)
        .def("feed", &SyntheticCollector::feed)
        .def("complete_foreign", &SyntheticCollector::complete_foreign)
        .def("drain", &SyntheticCollector::drain, unlocked)
        .def("take", &SyntheticCollector::take, unlocked)
        .def("counts", &SyntheticCollector::counts, unlocked);
    py::class_<Activity, std::unique_ptr<Activity, py::nodelete>>(module, "Activity")
        .def_static("open", &Activity::open, py::return_value_policy::reference, unlocked)
        .def("attach", &Activity::attach, unlocked)
        .def("enter", &Activity::enter)
        .def("leave", &Activity::leave)
        .def("release", &Activity::release, unlocked)
        .def("flush",
             [](Activity& activity, int patience_ms) { return activity.flush(std::chrono::milliseconds(patience_ms)); },
             unlocked)
        .def("drain",
             [](Activity& activity, int patience_ms) { return activity.drain(std::chrono::milliseconds(patience_ms)); },
             unlocked)
        .def("take", [](Activity& activity) { return activity.collector().take(false); }, unlocked)
        .def("counts", [](Activity& activity) { return as_map(activity.collector()); }, unlocked)
        .def_property_readonly("path", [](const Activity& activity) { return activity.library().path; })
        .def_property_readonly("version", [](const Activity& activity) { return activity.library().version; });
}

}  // namespace nvrx
