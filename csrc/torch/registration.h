// Operators of torch: how they are registered, and what they answer to tensors that C cannot read.
#pragma once
#include <memory>
#include <type_traits>

#include "held.h"

namespace raglane::operators {

// Tensors whose numbers are not those of their memory: negative views, zeros that were never written, and wrappers.
template <auto function> struct Refused;
template <class Result, class... Args, Result (*function)(Args...)> struct Refused<function> {
  static Result call(Args...) {
    constexpr const char* reason = "a tensor's numbers are not those of its memory";
    if constexpr (std::is_same_v<Result, std::vector<Tensor>>) return {};
    if constexpr (std::is_same_v<Result, Answer>) return {{}, RAGLANE_BAD_ARGUMENT, reason};
    refuse(reason);
  }
};
constexpr const char* refused[] = {"Negative", "ZeroTensor", "FuncTorchGradWrapper", "Python"};
// Modes in which a call in inference is more than its operator: casts, a trace, and transformations of functions.
constexpr const char* changed[] = {"AutocastCPU", "Tracer", "FuncTorchDynamicLayerFrontMode"};

// A second copy of this library in a process, such as that of a packaged model, registers nothing.
class Registration {
 public:
  using StableLibrary = torch::stable::detail::StableLibrary;

  explicit Registration(void (*registered)(Registration&)) {
    try {
      registered(*this);
    } catch (const std::exception&) {
      libraries_.clear();
    }
  }

  StableLibrary& names() { return add(StableLibrary::Kind::FRAGMENT, nullptr); }
  StableLibrary& of(const char* key) { return add(StableLibrary::Kind::IMPL, key); }

 private:
  std::vector<std::unique_ptr<StableLibrary>> libraries_;

  StableLibrary& add(StableLibrary::Kind kind, const char* key) {
    return *libraries_.emplace_back(std::make_unique<StableLibrary>(kind, "raglane", key, __FILE__, __LINE__));
  }
};

}  // namespace raglane::operators
