#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace eagercache {

// A key that is to be compiled.
struct CompileRequest {
  std::string digest;     // 64 hex digits: the entry's key in the store
  std::string call_json;  // the call's description; docs of describe_call plus op, overload,
                          // dispatch_key, digest, calls
};

// Where compiling is plugged in. The C++ core is complete without one: then keys that are not in
// the store stay native.
class MissHandler {
 public:
  virtual ~MissHandler() = default;

  // Takes a request, from the loader thread, with no lock of ours held. Must not compile on this
  // thread. Sooner or later somebody calls Runtime::complete with the request's digest. May throw:
  // the key then stays native in this process.
  virtual void submit(const CompileRequest& request) = 0;

  // An entry was put aside: nobody uses it any more, because of `reason`. On the thread whose call
  // found that, with no lock of ours held.
  virtual void note_put_aside(const std::string& /*digest*/,
                              const std::string& /*reason*/) noexcept {}

  // Runs `wait`, which blocks for a moment and says whether the waiting is over, on the calling
  // thread until it is, after letting go of whatever lock of the handler's world (the GIL) this
  // thread holds; takes it again afterwards. Ends early when this thread is interrupted (Ctrl-C).
  virtual void run_blocking(const std::function<bool()>& wait) = 0;
};

}  // namespace eagercache
