#include "dispatcher/device/cuda_graph.h"

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/device/symbol.h"

namespace eagercache {
namespace {

constexpr int kSuccess = CudaDriver::kSuccess;
constexpr int kThreadLocalCapture = 1;  // CUstreamCaptureMode
constexpr unsigned kNonBlocking = 1;    // CUstream_flags

// CUgraphNodeType.
constexpr int kKernelNode = 0;
constexpr int kMemcpyNode = 1;
constexpr int kMemsetNode = 2;
constexpr int kEmptyNode = 5;

bool find_graph_functions(void* library, GraphDriver& driver) noexcept {
  return find_symbol(library, "cuStreamCreate", driver.stream_create) &&
         find_symbol(library, "cuStreamBeginCapture_v2", driver.stream_begin_capture) &&
         find_symbol(library, "cuStreamEndCapture", driver.stream_end_capture) &&
         find_symbol(library, "cuGraphInstantiateWithFlags", driver.graph_instantiate) &&
         find_symbol(library, "cuGraphGetNodes", driver.graph_get_nodes) &&
         find_symbol(library, "cuGraphNodeGetType", driver.graph_node_get_type) &&
         find_symbol(library, "cuGraphMemcpyNodeGetParams", driver.graph_memcpy_node_get_params) &&
         find_symbol(library, "cuGraphUpload", driver.graph_upload) &&
         find_symbol(library, "cuGraphLaunch", driver.graph_launch) &&
         find_symbol(library, "cuGraphExecDestroy", driver.graph_exec_destroy) &&
         find_symbol(library, "cuGraphDestroy", driver.graph_destroy) &&
         find_symbol(library, "cuPointerGetAttribute", driver.pointer_get_attribute) &&
         find_symbol(library, "cuMemcpyDtoDAsync_v2", driver.memcpy_device_async) &&
         find_symbol(library, "cuEventCreate", driver.event_create) &&
         find_symbol(library, "cuEventRecord", driver.event_record) &&
         find_symbol(library, "cuEventQuery", driver.event_query) &&
         find_symbol(library, "cuEventElapsedTime", driver.event_elapsed) &&
         find_symbol(library, "cuEventDestroy_v2", driver.event_destroy);
}

// CUDA_MEMCPY3D_v2, of which one side is described twice.
struct CopySide {
  std::size_t x, y, z, level;
  int memory_type;  // CUmemorytype
  const void* host;
  unsigned long long device;
  void* array;
  void* reserved;
  std::size_t pitch, height;
};
struct CopyParameters {
  CopySide from;
  CopySide to;
  std::size_t width, height, depth;
};
static_assert(sizeof(CopyParameters) == 200);

bool is_on_device(const GraphDriver& driver, const CopySide& side) noexcept {
  constexpr int kDeviceMemory = 2;
  constexpr int kUnifiedMemory = 4;
  constexpr int kMemoryTypeAttribute = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  if (side.memory_type == kDeviceMemory) {
    return true;
  }
  unsigned type = 0;
  return side.memory_type == kUnifiedMemory &&
         driver.pointer_get_attribute(&type, kMemoryTypeAttribute, side.device) == kSuccess &&
         type == static_cast<unsigned>(kDeviceMemory);
}

// Why a graph must not be replayed; nullptr when each node works on the device's memory alone.
const char* unfit_node(const GraphDriver& driver, const std::vector<void*>& nodes) noexcept {
  for (void* const node : nodes) {
    int type = -1;
    if (driver.graph_node_get_type(node, &type) != kSuccess) {
      return "a node of the graph has no type";
    }
    if (type == kMemcpyNode) {
      CopyParameters copy{};
      if (driver.graph_memcpy_node_get_params(node, &copy) != kSuccess ||
          !is_on_device(driver, copy.from) || !is_on_device(driver, copy.to)) {
        return "it copies from or to the host's memory";
      }
    } else if (type != kKernelNode && type != kMemsetNode && type != kEmptyNode) {
      return "it does more on the device than kernels and copies";
    }
  }
  return nullptr;
}

}  // namespace

const GraphDriver* GraphDriver::get() noexcept {
  static const GraphDriver* const found = []() -> const GraphDriver* {
    void* library = CudaDriver::get() == nullptr ? nullptr : dlopen("libcuda.so.1", RTLD_NOW);
    static GraphDriver driver{};
    return library != nullptr && find_graph_functions(library, driver) ? &driver : nullptr;
  }();
  return found;
}

void* make_capture_stream() noexcept {
  const GraphDriver* const driver = GraphDriver::get();
  void* stream = nullptr;
  const RelaxedCapture relaxed;
  if (driver == nullptr || driver->stream_create(&stream, kNonBlocking) != kSuccess) {
    return nullptr;
  }
  return stream;
}

CudaGraph::~CudaGraph() {
  if (executable_ != nullptr) {
    // What of it is running ends first. Another thread may be capturing, here and below.
    const RelaxedCapture relaxed;
    GraphDriver::get()->graph_exec_destroy(executable_);
  }
}

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : executable_(std::exchange(other.executable_, nullptr)), num_nodes_(other.num_nodes_) {}

CudaGraph& CudaGraph::operator=(CudaGraph&& other) noexcept {
  std::swap(executable_, other.executable_);
  std::swap(num_nodes_, other.num_nodes_);
  return *this;
}

bool CudaGraph::launch(void* stream) const noexcept {
  return GraphDriver::get()->graph_launch(executable_, stream) == kSuccess;
}

GraphCapture::~GraphCapture() {
  if (open_) {
    std::string ignored;
    end(&ignored);
  }
}

bool GraphCapture::begin() noexcept {
  const GraphDriver* const driver = GraphDriver::get();
  open_ =
      driver != nullptr && driver->stream_begin_capture(stream_, kThreadLocalCapture) == kSuccess;
  return open_;
}

CudaGraph GraphCapture::end(std::string* reason) noexcept {
  const GraphDriver& driver = *GraphDriver::get();
  CudaGraph made;
  open_ = false;
  void* graph = nullptr;
  if (const int error = driver.stream_end_capture(stream_, &graph); error != kSuccess) {
    *reason = "it cannot be captured (" + CudaDriver::get()->describe(error) + ")";
    return made;
  }
  const RelaxedCapture relaxed;
  std::size_t count = 0;
  int error = driver.graph_get_nodes(graph, nullptr, &count);
  std::vector<void*> nodes(count);
  if (error == kSuccess && count != 0) {
    error = driver.graph_get_nodes(graph, nodes.data(), &count);
  }
  const char* const unfit = error == kSuccess ? unfit_node(driver, nodes) : "its nodes are unknown";
  if (unfit != nullptr) {
    *reason = unfit;
  } else if (error = driver.graph_instantiate(&made.executable_, graph, 0); error != kSuccess) {
    made.executable_ = nullptr;
    *reason = "the driver makes no graph of it (" + CudaDriver::get()->describe(error) + ")";
  } else {
    made.num_nodes_ = count;
  }
  driver.graph_destroy(graph);
  return made;
}

StreamTimer::StreamTimer() noexcept {
  const GraphDriver* const driver = GraphDriver::get();
  if (driver != nullptr) {
    const RelaxedCapture relaxed;
    driver->event_create(&begin_, 0);
    driver->event_create(&end_, 0);
  }
}

StreamTimer::~StreamTimer() {
  const RelaxedCapture relaxed;
  for (void* event : {begin_, end_}) {
    if (event != nullptr) {
      GraphDriver::get()->event_destroy(event);
    }
  }
}

bool StreamTimer::begin(void* stream) noexcept {
  return end_ != nullptr && GraphDriver::get()->event_record(begin_, stream) == kSuccess;
}

bool StreamTimer::end(void* stream) noexcept {
  return GraphDriver::get()->event_record(end_, stream) == kSuccess;
}

std::optional<float> StreamTimer::elapsed() const noexcept {
  const GraphDriver& driver = *GraphDriver::get();
  const RelaxedCapture relaxed;  // an event may not be asked while another thread captures, else
  float milliseconds = 0;
  if (driver.event_query(end_) != kSuccess ||
      driver.event_elapsed(&milliseconds, begin_, end_) != kSuccess) {
    return std::nullopt;
  }
  return milliseconds;
}

}  // namespace eagercache
