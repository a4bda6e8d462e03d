// A service without a Python interpreter: several threads answer requests with kernels of a bundle
// or a store.
//
//     cpp_service --weights FILE [--bundle FILE --key FILE] [--store DIR] [--threads N] [--always]
//     [--or-native] [--device cuda]
//
// With --device cuda the model is computed on a GPU, each thread's requests on a stream of its own.
//
// A request is a line on standard input: a name and 16 numbers. Its answer is a line on standard
// output, in whatever order they are ready: the name and the probabilities of 4 classes. At the
// end, one line on standard error says what kernels answered. Exit code: 0; 2 when the command or a
// file cannot be used, which is said in one line.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <eagercache/eagercache.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <iostream>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::int64_t kFeatures = 16;
constexpr std::int64_t kClasses = 4;

struct Weights {
  at::Tensor scale;   // kFeatures
  at::Tensor shift;   // kFeatures
  at::Tensor matrix;  // kClasses, kFeatures
};

struct Request {
  std::string name;
  std::vector<float> features;
};

struct Arguments {
  std::string weights;
  at::Device device = at::kCPU;
  eagercache::EnableOptions options;
  int threads = 4;
  bool or_native = false;
  bool environment = false;
};

// Requests of one reader for several threads.
class Queue {
 public:
  void put(Request request) {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(request));
    changed_.notify_one();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  // Waits for a request; none when the queue is closed and empty.
  std::optional<Request> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !requests_.empty(); });
    if (requests_.empty()) {
      return std::nullopt;
    }
    Request request = std::move(requests_.front());
    requests_.pop_front();
    return request;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;
  bool closed_ = false;
};

// "cpu", "cuda" (the first GPU that this process may use) or "cuda:1".
at::Device device_of(const std::string& name) {
  if (name.rfind("cpu", 0) != 0 && name.rfind("cuda", 0) != 0) {
    throw std::runtime_error("--device takes cpu, cuda or cuda:N, not " + name);
  }
  const at::Device device(name);
  if (device.is_cpu()) {
    return device;
  }
  if (!at::globalContext().hasCUDA()) {
    throw std::runtime_error("there is no GPU that this torch can use");
  }
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  if (device.has_index() && device.index() >= cuda.deviceCount()) {
    throw std::runtime_error("there is no " + name);
  }
  return device.has_index() ? device : cuda.getDevice();
}

Arguments parse(int count, char** values) {
  Arguments arguments;
  arguments.options.preload = true;  // the first request is as quick as the others
  for (int i = 1; i < count; ++i) {
    const std::string option = values[i];
    const auto value = [&]() -> std::string {
      if (++i >= count) {
        throw std::runtime_error(option + " needs a value");
      }
      return values[i];
    };
    if (option == "--weights") {
      arguments.weights = value();
    } else if (option == "--bundle") {
      arguments.options.bundle = value();
    } else if (option == "--key") {
      arguments.options.trusted_keys.emplace_back(value());
    } else if (option == "--store") {
      arguments.options.store = value();
    } else if (option == "--device") {
      arguments.device = device_of(value());
    } else if (option == "--threads") {
      arguments.threads = std::max(1, std::atoi(value().c_str()));
    } else if (option == "--always") {
      arguments.options.always = true;
    } else if (option == "--or-native") {
      arguments.or_native = true;
    } else if (option == "--environment") {
      arguments.environment = true;
    } else {
      throw std::runtime_error("unknown option " + option);
    }
  }
  if (arguments.weights.empty() && !arguments.environment) {
    throw std::runtime_error("--weights is missing");
  }
  return arguments;
}

at::Tensor read_tensor(std::ifstream& file, at::IntArrayRef sizes) {
  at::Tensor tensor = at::empty(sizes, at::kFloat);
  file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  return tensor;
}

Weights read_weights(const std::string& path, at::Device device) {
  std::ifstream file(path, std::ios::binary);
  Weights weights{read_tensor(file, {kFeatures}), read_tensor(file, {kFeatures}),
                  read_tensor(file, {kClasses, kFeatures})};
  if (!file) {
    throw std::runtime_error(path + " does not hold the model's weights");
  }
  // To a GPU these wait for the copies, so that every thread's stream sees the weights.
  return {weights.scale.to(device), weights.shift.to(device), weights.matrix.to(device)};
}

// As model.py has it.
at::Tensor classify(const at::Tensor& features, const Weights& weights) {
  const at::Tensor normal = at::layer_norm(features, {kFeatures}, weights.scale, weights.shift);
  return at::softmax(at::mm(at::silu(normal), weights.matrix.t()), -1);
}

std::string answer(const Request& request, const Weights& weights) {
  const at::Tensor features = at::empty({1, kFeatures}, at::kFloat);
  std::copy(request.features.begin(), request.features.end(), features.data_ptr<float>());
  const at::Tensor probabilities =
      classify(features.to(weights.matrix.device()), weights).to(at::kCPU);
  std::ostringstream line;
  line.precision(9);  // enough to tell any two floats apart
  line << request.name;
  for (std::int64_t i = 0; i < kClasses; ++i) {
    line << ' ' << probabilities.data_ptr<float>()[i];
  }
  line << '\n';
  return line.str();
}

void serve(Queue& queue, const Weights& weights, std::mutex& output) {
  // Torch keeps the number of threads per thread, and kernels are for one number.
  at::set_num_threads(1);
  const c10::InferenceMode inference;
  std::optional<c10::StreamGuard> stream;
  if (const at::Device device = weights.matrix.device(); !device.is_cpu()) {
    const c10::impl::VirtualGuardImpl cuda(device.type());
    stream.emplace(cuda.getStreamFromGlobalPool(device));
  }
  while (const std::optional<Request> request = queue.take()) {
    const std::string line = answer(*request, weights);
    const std::lock_guard lock(output);
    std::cout << line << std::flush;
  }
}

// Puts each line of `input` into the queue; a malformed one is answered at once.
void read_requests(std::istream& input, Queue& queue, std::mutex& output) {
  for (std::string line; std::getline(input, line);) {
    std::istringstream words(line);
    Request request;
    words >> request.name;
    for (float number = 0; words >> number;) {
      request.features.push_back(number);
    }
    if (request.features.size() == kFeatures && words.eof()) {
      queue.put(std::move(request));
    } else {
      const std::lock_guard lock(output);
      std::cout << request.name << " error: " << kFeatures << " numbers are needed" << std::endl;
    }
  }
}

void report() {
  const eagercache::Statistics counts = eagercache::statistics();
  std::cerr << "kernels answered " << counts.hits << " of "
            << counts.hits + counts.misses + counts.pending + counts.native + counts.aside
            << " calls of hooked operators; " << counts.kernels_loaded << " were loaded\n";
  for (const eagercache::KernelVerdict& verdict : eagercache::verdicts()) {
    if (verdict.decision != "kernel") {
      std::cerr << verdict.op << " stays native: " << verdict.reason << '\n';
    }
  }
}

int run(const Arguments& arguments) {
  if (arguments.environment) {
    std::cout << eagercache::running_environment();
    return 0;
  }
  const Weights weights = read_weights(arguments.weights, arguments.device);
  if (const eagercache::EnableResult enabled = eagercache::enable(arguments.options); !enabled) {
    std::cerr << "cpp_service: " << enabled.reason << '\n';
    if (!arguments.or_native) {
      return 2;
    }
  }
  Queue queue;
  std::mutex output;
  std::vector<std::thread> threads;
  for (int i = 0; i < arguments.threads; ++i) {
    threads.emplace_back([&] { serve(queue, weights, output); });
  }
  read_requests(std::cin, queue, output);
  queue.close();
  for (std::thread& thread : threads) {
    thread.join();
  }
  report();
  eagercache::shut_down();
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run(parse(count, values));
  } catch (const std::exception& error) {
    std::cerr << "cpp_service: " << error.what() << '\n';
    return 2;
  }
}
