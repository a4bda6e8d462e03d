// The public functions of eagercache/eagercache.h: what module.cc is for Python, for C++.

#include "eagercache/eagercache.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "cpp_api/build_facts.h"
#include "cpp_api/running_environment.h"
#include "cpp_api/settings.h"
#include "cpp_api/store_choice.h"
#include "dispatcher/base/log.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/kernels/cuda_kernel.h"
#include "dispatcher/observe/verification.h"
#include "dispatcher/operators/eligibility.h"
#include "dispatcher/runtime/runtime.h"
#include "guards/key/call_key.h"
#include "kernel_cache/loading/shared_library.h"

namespace eagercache {
namespace {

namespace fs = std::filesystem;

using OperatorAtKey = std::pair<std::string, std::string>;  // "aten::var.correction", "CPU"

// Of enable(), disable() and shut_down(). Leaked, as the runtime is.
std::mutex& api_mutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}
bool ended = false;  // guarded by api_mutex()

std::pair<std::string, std::string> split(const std::string& op) {
  const std::size_t dot = op.find('.');
  return {op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1)};
}

std::string joined(const std::string& name, const std::string& overload) {
  return overload.empty() ? name : name + "." + overload;
}

// "var" is "aten::var".
std::string with_namespace(const std::string& op) {
  return op.find("::") == std::string::npos ? "aten::" + op : op;
}

// Whether `spec` names the operator or, without an overload, all of its name.
bool names(const std::string& spec, const std::string& op) {
  const std::string whole = with_namespace(spec);
  return whole == op || whole == split(op).first;
}

bool is_named_by(const std::vector<std::string>& specs, const std::string& op) {
  return std::ranges::any_of(specs, [&op](const std::string& spec) { return names(spec, op); });
}

std::vector<std::string> dispatch_keys() {
  if (CudaDriver::get() != nullptr && at::globalContext().hasCUDA()) {
    return {"CPU", "CUDA"};
  }
  return {"CPU"};
}

// The operators that the caller names, where they can be hooked.
Result<std::vector<OperatorAtKey>> named_operators(const std::vector<std::string>& specs) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  std::vector<OperatorAtKey> found;
  for (const std::string& spec : specs) {
    std::string reason = "there is no operator " + spec;
    const std::size_t before = found.size();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const std::string op = joined(name.name, name.overload_name);
      const auto handle = names(spec, op) ? dispatcher.findSchema(name) : std::nullopt;
      if (!handle) {
        continue;
      }
      for (const std::string& key : dispatch_keys()) {
        const Eligibility eligibility = check_eligibility(*handle, c10::parseDispatchKey(key));
        if (eligibility.eligible) {
          found.emplace_back(op, key);
        } else {
          reason = op + " cannot be accelerated: " + eligibility.reason;
        }
      }
    }
    if (found.size() == before) {
      return Status(StatusCode::kInvalidArgument, reason);
    }
  }
  return found;
}

Result<std::unique_ptr<DiskStore>> open_store(const fs::path& root, const std::string& environment,
                                              const CppSettings& settings, bool read_only,
                                              Revocations revoked) {
  StoreOptions options;
  options.revoked = std::move(revoked);
  options.on_withdrawn = [](const std::string& why) { warn_once("withdrawn:" + why, why); };
  options.root = root;
  options.environment = environment;
  options.read_only = read_only;
  options.tiers = settings.tiers;
  options.allow_untrusted = settings.allow_untrusted;
  options.max_bytes = settings.max_bytes;
  return DiskStore::open(std::move(options));
}

// What is needed to enable, all of it checked, nothing of it in use.
struct Prepared {
  std::shared_ptr<DiskStore> store;
  Policy policy;
  double verify = 0;
  std::vector<OperatorAtKey> operators;
  std::vector<Manifest> to_load;  // before enable() returns
};

// With a bundle: publishes it and opens the environment that it went to.
Status prepare_store(const EnableOptions& options, const CppSettings& settings,
                     EnableResult* result, Prepared* prepared) {
  const fs::path root = options.store.empty() ? settings.directory : options.store;
  if (root.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  "no store is named; set EnableOptions::store or EAGERCACHE_DIR");
  }
  result->store = fs::absolute(root);
  std::string text = running_environment_text();
  if (options.bundle.empty()) {
    Result<StoredEnvironment> chosen = choose_environment(result->store, options.environment);
    for (const fs::path& tier : settings.tiers) {
      if (!chosen) {
        Result<StoredEnvironment> of_tier = choose_environment(tier, options.environment);
        if (of_tier) chosen = std::move(of_tier);
      }
    }
    if (!chosen) {
      return chosen.status();
    }
    text = chosen.value().text;
  } else if (options.read_only) {
    return Status(StatusCode::kInvalidArgument, "a bundle cannot be put into a store read_only");
  }
  Result<Revocations> revoked = read_revoked(options.revoked);
  if (!revoked) {
    return revoked.status();
  }
  std::unique_ptr<Bundle> bundle;
  if (!options.bundle.empty()) {
    Result<Bundle> read = read_usable_bundle(options.bundle, options.trusted_keys, options.revoked);
    if (!read) {
      return read.status();
    }
    result->signer = read->signer.hex();
    bundle = std::make_unique<Bundle>(std::move(read).value());
  }
  Result<std::unique_ptr<DiskStore>> opened =
      open_store(result->store, text, settings, options.read_only, std::move(revoked).value());
  if (!opened) {
    return opened.status();
  }
  prepared->store = std::move(opened).value();
  result->environment = prepared->store->environment_id();
  if (bundle) {
    if (const auto counts = import_bundle(*bundle, *prepared->store); !counts) {
      return counts.status();
    }
  }
  return Status::ok();
}

Status prepare(const EnableOptions& options, const CppSettings& settings, EnableResult* result,
               Prepared* prepared) {
  if (const std::string foreign = foreign_torch(); !foreign.empty()) {
    return Status(StatusCode::kIncompatible, foreign);
  }
  Policy& policy = prepared->policy;
  policy.on_miss = options.load_in_background ? OnMiss::kBackground : OnMiss::kNative;
  policy.choose = settings.always.value_or(options.always) ? Choose::kAlways : Choose::kFaster;
  policy.numerics =
      settings.bitwise.value_or(options.bitwise) ? Numerics::kBitwise : Numerics::kAccurate;
  policy.compile_after = 1;
  policy.shape_classes = true;
  prepared->verify = settings.verify;
  if (Status status = prepare_store(options, settings, result, prepared); !status) {
    return status;
  }
  Result<StoreContents> contents =
      list_contents(*prepared->store, policy.choose == Choose::kAlways ? "always" : "faster");
  if (!contents) {
    return contents.status();
  }
  result->kernels = contents->kernels.size();
  result->decisions = contents->decisions;
  if (options.preload) {
    prepared->to_load = std::move(contents->kernels);
  }
  if (options.operators.empty()) {
    prepared->operators.assign(contents->operators.begin(), contents->operators.end());
    return Status::ok();
  }
  Result<std::vector<OperatorAtKey>> named = named_operators(options.operators);
  if (!named) {
    return named.status();
  }
  prepared->operators = std::move(named).value();
  return Status::ok();
}

void hook_operators(const std::vector<OperatorAtKey>& operators,
                    const std::vector<std::string>& skip, EnableResult* result) {
  Runtime& runtime = Runtime::instance();
  for (OperatorHook* hook : runtime.hooks()) {
    hook->set_active(false);
  }
  for (const auto& [op, key] : operators) {
    const std::string shown = op + " at " + key;
    if (is_named_by(skip, op)) {
      result->left_out.push_back(shown + ": skipped");
      continue;
    }
    const auto [name, overload] = split(op);
    const Result<OperatorHook*> hook = runtime.register_operator(name, overload, key);
    if (!hook) {
      result->left_out.push_back(shown + ": " + hook.status().message());
      continue;
    }
    hook.value()->set_active(true);
    result->operators.push_back(shown);
  }
}

// As the entry's first call would, without one. An entry whose text is not the key that it was made
// for (a kernel of a whole class) is left to its first call.
void load_kernels(const std::vector<Manifest>& kernels) {
  Runtime& runtime = Runtime::instance();
  for (const Manifest& kernel : kernels) {
    const auto [name, overload] = split(kernel.fact("op"));
    OperatorHook* const hook = runtime.find_hook(name, overload, kernel.fact("dispatch_key"));
    KeyBuffer key;
    std::string problem;
    if (hook != nullptr && hook->active() && parse_call(kernel.fact("call"), &key, &problem) &&
        hook->entry_digest(key.words(), runtime.policy_tag()) == kernel.key) {
      runtime.load_now(*hook, key.words(), hash_words(key.words()));
    }
  }
}

// Nothing here fails, but for a forked child.
Status switch_on(const Prepared& prepared, const std::vector<std::string>& skip,
                 EnableResult* result) {
  Runtime& runtime = Runtime::instance();
  if (runtime.forked()) {
    return Status(StatusCode::kUnsupported,
                  "this process was forked from one that used eagercache; it stays native");
  }
  runtime.stop_at_exit();
  set_verification_share(prepared.verify);
  runtime.set_store(prepared.store);
  runtime.set_policy(prepared.policy);
  hook_operators(prepared.operators, skip, result);
  runtime.set_answering(true);
  load_kernels(prepared.to_load);
  return Status::ok();
}

void refuse(const Status& status, EnableResult* result) {
  result->enabled = false;
  result->code = status_code_name(status.code());
  result->reason = status.message();
}

void enable_into(const EnableOptions& options, EnableResult* result) {
  const CppSettings settings = read_settings();
  set_log_level(settings.log);
  if (settings.disable) {
    result->code = "disabled";
    result->reason = "EAGERCACHE_DISABLE is set; every call stays native";
    return;
  }
  const std::lock_guard lock(api_mutex());
  if (ended) {
    return refuse(Status(StatusCode::kUnsupported, "shut_down() was called; there is no way back"),
                  result);
  }
  Prepared prepared;
  Status status = prepare(options, settings, result, &prepared);
  if (status) {
    std::vector<std::string> skip = options.skip;
    skip.insert(skip.end(), settings.skip.begin(), settings.skip.end());
    status = switch_on(prepared, skip, result);
  }
  if (!status) {
    return refuse(status, result);
  }
  result->enabled = true;
  for (const fs::path& root : prepared.store->untrusted_roots()) {
    warn_once("untrusted:" + root.string(),
              "EAGERCACHE_ALLOW_UNTRUSTED is set, and other users may write " + root.string() +
                  ": whoever does can run code in this process");
  }
  for (const Status& problem : prepared.store->tier_problems()) {
    warn_once("tier:" + problem.message(),
              "a store of EAGERCACHE_TIERS is not used: " + problem.message());
  }
  log_event(LogLevel::kInfo, "enable",
            {{"operators", std::to_string(result->operators.size())},
             {"store", result->store.string()},
             {"environment", result->environment}});
}

}  // namespace

EnableResult enable(const EnableOptions& options) {
  EnableResult result;
  try {
    enable_into(options, &result);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    refuse(Status(StatusCode::kIoError, error.what()), &result);
  }
  return result;
}

void disable() noexcept { Runtime::instance().set_answering(false); }

Statistics statistics() {
  Statistics sums;
  for (const OperatorHook* hook : Runtime::instance().hooks()) {
    const CallCounts counts = read_counts(hook->index());
    const auto of = [&counts](CallOutcome outcome) {
      return counts.outcomes[static_cast<std::size_t>(outcome)];
    };
    OperatorStatistics row;
    row.op = hook->full_name();
    row.dispatch_key = c10::toString(hook->dispatch_key());
    sums.hits += row.hits = of(CallOutcome::kHit);
    sums.misses += row.misses = of(CallOutcome::kMiss);
    sums.pending += row.pending = of(CallOutcome::kPending);
    sums.native += row.native = of(CallOutcome::kNative);
    sums.aside += row.aside = of(CallOutcome::kAside);
    sums.operators.push_back(std::move(row));
  }
  sums.kernels_loaded = SharedLibrary::loaded_count() + CudaKernel::loaded_count();
  return sums;
}

std::vector<KernelVerdict> verdicts() {
  std::vector<KernelVerdict> all;
  for (const OperatorHook* hook : Runtime::instance().hooks()) {
    for (VerdictRecord& verdict : Runtime::instance().verdicts(*hook)) {
      all.push_back({hook->full_name(), c10::toString(hook->dispatch_key()),
                     std::move(verdict.decision), std::move(verdict.reason),
                     std::move(verdict.call_json)});
    }
  }
  return all;
}

bool wait_until_loaded(double seconds) { return Runtime::instance().wait_until_idle(seconds); }

void shut_down() noexcept {
  const std::lock_guard lock(api_mutex());
  ended = true;
  Runtime::instance().shut_down();
}

std::string running_environment() { return running_environment_text(); }

const char* version() noexcept { return build_facts::kVersion; }

}  // namespace eagercache
