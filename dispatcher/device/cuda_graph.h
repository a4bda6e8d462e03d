#pragma once

// CUDA graphs by the driver: capture of a stream, an executable graph, events. The functions are
// found at run time, as those of cuda_driver.h. Nothing here throws or needs the GIL; the device's
// context must be the thread's.

#include <cstddef>
#include <optional>
#include <string>

namespace eagercache {

// The driver's functions for graphs, streams and events (CUDA driver API reference).
struct GraphDriver {
  using Result = int;

  Result (*stream_create)(void** stream, unsigned flags);
  Result (*stream_begin_capture)(void* stream, int mode);
  Result (*stream_end_capture)(void* stream, void** graph);
  Result (*graph_instantiate)(void** executable, void* graph, unsigned long long flags);
  Result (*graph_get_nodes)(void* graph, void** nodes, std::size_t* count);
  Result (*graph_node_get_type)(void* node, int* type);
  Result (*graph_memcpy_node_get_params)(void* node, void* parameters);
  Result (*graph_upload)(void* executable, void* stream);
  Result (*graph_launch)(void* executable, void* stream);
  Result (*graph_exec_destroy)(void* executable);
  Result (*graph_destroy)(void* graph);
  Result (*pointer_get_attribute)(void* data, int attribute, unsigned long long pointer);
  Result (*memcpy_device_async)(unsigned long long to, unsigned long long from, std::size_t bytes,
                                void* stream);
  Result (*event_create)(void** event, unsigned flags);
  Result (*event_record)(void* event, void* stream);
  Result (*event_query)(void* event);
  Result (*event_elapsed)(float* milliseconds, void* begin, void* end);
  Result (*event_destroy)(void* event);

  // nullptr when there is no driver, or one without graphs.
  static const GraphDriver* get() noexcept;
};

// A stream of ours for captures, which waits for no other: nullptr when none can be made. Never
// destroyed: libraries remember streams by their handle.
void* make_capture_stream() noexcept;

// An executable graph. Its owner keeps what it reads and writes alive. One launch at a time may be
// running: two on one stream are.
class CudaGraph {
 public:
  CudaGraph() = default;
  ~CudaGraph();
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&& other) noexcept;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  bool valid() const noexcept { return executable_ != nullptr; }
  std::size_t num_nodes() const noexcept { return num_nodes_; }
  // False when the driver refuses; nothing has run then.
  bool launch(void* stream) const noexcept;

 private:
  friend class GraphCapture;
  void* executable_ = nullptr;
  std::size_t num_nodes_ = 0;
};

// What this thread puts on `stream` between begin() and end() becomes a graph and does not run. A
// call that cannot be captured makes it fail, and disturbs no capture of another thread.
class GraphCapture {
 public:
  explicit GraphCapture(void* stream) noexcept : stream_(stream) {}
  ~GraphCapture();
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;

  bool begin() noexcept;
  // The graph, or why there is none: the driver refused, or a node would read the host's memory or
  // run there when it is replayed, which may hold something else by then.
  CudaGraph end(std::string* reason) noexcept;

 private:
  void* const stream_;
  bool open_ = false;
};

// The time between two points of a stream, known once the device has passed them.
class StreamTimer {
 public:
  StreamTimer() noexcept;
  ~StreamTimer();
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  bool begin(void* stream) noexcept;
  bool end(void* stream) noexcept;
  // Milliseconds; nothing before the device was there, or where it cannot be said.
  std::optional<float> elapsed() const noexcept;

 private:
  void* begin_ = nullptr;
  void* end_ = nullptr;
};

}  // namespace eagercache
