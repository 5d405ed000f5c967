// The kernels of the emulated device: those of the CPU, on the same memory.
//
// Each operator for which the CPU has a kernel of its own gets `run_as_on_cpu`, so that both compute the same bytes
// by the same code; operators without one are composed of others, on this device as on the CPU. Where torch itself
// composes an operator otherwise for other devices than the CPU, there is a kernel here that does as the CPU does:
// convolution, dropout, attention and autocast.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "runtime.hpp"

namespace emulated {

using c10::IValue;
using torch::jit::Stack;

// ------------------------------------------------------------------------------------------------ generators

// One for each device. It draws what a generator of the CPU with the same seed draws.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  at::Generator drawing = at::detail::createCPUGenerator();

  void set_current_seed(uint64_t seed) override {
    drawing.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    drawing.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return drawing.get_offset();
  }
  uint64_t current_seed() const override {
    return drawing.current_seed();
  }
  uint64_t seed() override {
    return drawing.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    drawing.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawing.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device_.index());
    made->drawing = drawing.clone();
    return made;
  }
};

inline const at::Generator& default_generator(int device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int index = 0; index < kMaxDevices; ++index) {
      all->push_back(at::make_generator<Generator>(index));
    }
    return all;
  }();
  return made->at(device < 0 ? current().device : device);
}

// ------------------------------------------------------------------------------------------------ tensors

inline bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// Numbers of Python take part in the promotion of types in another way than tensors do.
inline at::Tensor keep_number(at::Tensor made, const at::Tensor& of) {
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

// The same elements as a tensor of the CPU. It holds no memory: it is good only as long as the block is ours.
inline at::Tensor same_memory(const at::Tensor& tensor) {
  auto made = at::from_blob(
      tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.scalar_type()));
  return keep_number(made, tensor);
}

// A tensor of the CPU of the same shape, strides and type.
inline at::Tensor zeros_like_on_cpu(const at::Tensor& tensor) {
  return keep_number(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type()).zero_(), tensor);
}

inline at::Tensor empty_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType type) {
  c10::DeviceGuard guard(c10::Device(kType, device));
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

// Nothing but kernels of backends: no autograd, no autocast, no modes of Python.
inline c10::impl::ForceDispatchKeyGuard plainly() {
  return c10::impl::ForceDispatchKeyGuard(
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
}

inline void resize_storage(c10::StorageImpl* storage, size_t num_bytes) {
  const int device = storage->device().index();
  auto fresh = allocate_on(device, num_bytes);
  Locked locked(mutex());
  if (size_t kept = std::min(num_bytes, storage->nbytes())) {
    void *target = fresh.get(), *source = storage->mutable_data();
    scheduler().launch(current_queue(device), [=] { std::memcpy(target, source, kept); });
    device_allocator().recordStream(
        storage->data_ptr(), Guard::stream(device, current().stream[device]));
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(num_bytes);
}

inline const at::Tensor& resize_to(
    const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    const size_t needed =
        (self.storage_offset() + at::detail::computeStorageNbytesContiguous(sizes, 1)) * self.element_size();
    if (needed > self.storage().nbytes()) {
      resize_storage(self.storage().unsafeGetStorageImpl(), needed);
    }
  }
  if (format && *format != c10::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

// ------------------------------------------------------------------------------------------------ run_as_on_cpu

using Change = std::function<at::Tensor(const at::Tensor&)>;

inline bool holds_tensors(const IValue& value) {
  if (!value.isList()) {
    return false;
  }
  auto type = value.toListRef().empty() ? nullptr : value.type()->cast<c10::ListType>();
  return type && type->getElementType()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

// Returns an argument with its tensors changed, also in a list; undefined ones stay.
inline IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  }
  if (holds_tensors(value)) {
    c10::impl::GenericList made(value.type()->expectRef<c10::ListType>().getElementType());
    for (const IValue& element : value.toListRef()) {
      made.push_back(changed(element, change));
    }
    return made;
  }
  return value;
}

inline void each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  changed(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

inline bool has_tensors(const c10::TypePtr& type) {
  return type->str().find("Tensor") != std::string::npos;
}

// A call of an operator on this device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), num_(schema_.arguments().size()) {
    args_.assign(stack->end() - num_, stack->end());
    find_device();
    for (size_t index = 0; index < num_; ++index) {
      const auto& argument = schema_.arguments()[index];
      is_random_ = is_random_ || argument.type()->str().find("Generator") != std::string::npos;
      written_ = written_ || is_written(argument);
    }
    for (const auto& returned : schema_.returns()) {
      makes_tensors_ = makes_tensors_ || (has_tensors(returned.type()) && !returned.alias_info());
    }
  }

  void run() {
    initialize();
    std::unique_lock<std::recursive_mutex> locked(mutex());
    const bool is_late = scheduler().is_late();
    locked.unlock();
    const bool has_effect = makes_tensors_ || written_;
    if (!is_late || !has_effect || op_.hasTag(at::Tag::dynamic_output_shape) || !run_late()) {
      wait(!has_effect ? &Waits::item : op_.hasTag(at::Tag::dynamic_output_shape) ? &Waits::shape : nullptr);
      run_now();
    }
  }

 private:
  void find_device() {
    bool takes_others = c10::string_view(schema_.name()).find("index") != std::string::npos;
    for (const IValue& value : args_) {
      if (value.isDevice()) {
        device_ = std::max(device_, Guard::index(value.toDevice()));
      }
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_here(tensor)) {
          TORCH_CHECK(
              !has_tensor_ || device_ == tensor.device().index() || tensor.dim() == 0, schema_.name(),
              ": Expected all tensors to be on the same device, but found at least two devices, emulated:", device_,
              " and emulated:", static_cast<int>(tensor.device().index()));
          device_ = tensor.device().index();
          has_tensor_ = true;
        } else {
          TORCH_CHECK(
              tensor.dim() == 0 || takes_others, schema_.name(), ": Expected all tensors to be on the same device, ",
              "but found at least two devices, emulated and cpu");
        }
      });
    }
    device_ = device_ < 0 ? current().device : device_;
  }

  // Waits for the stream, as a kernel does whose result the host needs at once.
  void wait(int64_t Waits::*counter) {
    Locked locked(mutex());
    if (counter) {
      ++(process().waits.*counter);
    }
    scheduler().finish(current_queue(device_));
  }

  at::Generator drawing(const IValue& given) const {
    auto generator = given.isNone() ? default_generator(device_) : given.toGenerator();
    return generator.get<Generator>()->drawing;
  }

  // The arguments as the CPU gets them. Tensors without elements that are written are new: a kernel may resize them.
  Stack on_cpu(bool may_resize) const {
    Stack made;
    for (size_t index = 0; index < num_; ++index) {
      const auto& argument = schema_.arguments()[index];
      const IValue& value = args_[index];
      if (value.isDevice()) {
        made.emplace_back(c10::Device(c10::DeviceType::CPU));
      } else if (argument.type()->str().find("Generator") != std::string::npos) {
        made.emplace_back(drawing(value));
      } else {
        const bool is_new = may_resize && is_written(argument);
        made.push_back(changed(value, [&](const at::Tensor& tensor) {
          if (!is_here(tensor)) {
            auto copied = tensor.clone();  // the host may change it before the kernel runs
            return keep_number(copied, tensor);
          }
          return is_new && !tensor.numel() ? at::empty({0}, tensor.scalar_type()) : same_memory(tensor);
        }));
      }
    }
    return made;
  }

  void run_now() {
    auto guard = plainly();
    Stack cpu = on_cpu(true), given = cpu;
    op_.callBoxed(&cpu);
    for (size_t index = 0; index < num_; ++index) {
      if (is_written(schema_.arguments()[index]) && args_[index].isTensor() && is_here(args_[index].toTensor())) {
        const at::Tensor &ours = args_[index].toTensor(), &theirs = given[index].toTensor();
        if (!ours.numel() && theirs.numel()) {
          resize_to(ours, theirs.sizes(), std::nullopt);
          same_memory(ours).copy_(theirs);
        }
      }
    }
    give(cpu, [&](const at::Tensor& theirs) {
      auto ours = empty_on(device_, theirs.sizes(), theirs.strides(), theirs.scalar_type());
      same_memory(ours).copy_(theirs);
      return ours;
    });
  }

  // Launches the call; returns false if it cannot be launched without its values.
  bool run_late() {
    auto guard = plainly();
    if (is_random_) {
      return draw_now();
    }
    Stack made;
    if (has_tensors_in_returns()) {
      std::vector<std::pair<at::Tensor, at::Tensor>> written;
      try {
        made = run_on_zeros(written);
      } catch (const c10::Error&) {  // it minds its values, or fails on all of them
        return false;
      }
      for (auto& [ours, theirs] : written) {
        if (ours.sizes() != theirs.sizes()) {
          resize_to(ours, theirs.sizes(), std::nullopt);
        }
      }
    }
    std::vector<at::Tensor> targets;
    Stack cpu = on_cpu(false);
    give(made, [&](const at::Tensor& theirs) {
      auto ours = empty_on(device_, theirs.sizes(), theirs.strides(), theirs.scalar_type());
      targets.push_back(same_memory(ours));
      return ours;
    });
    Locked locked(mutex());
    scheduler().launch(
        current_queue(device_), [op = op_, cpu = std::move(cpu), targets = std::move(targets)]() mutable {
          auto guard = plainly();
          op.callBoxed(&cpu);
          copy_new(op.schema(), cpu, targets);
        });
    return true;
  }

  static void copy_new(const c10::FunctionSchema& schema, const Stack& returned, std::vector<at::Tensor>& targets) {
    size_t next = 0;
    for (size_t index = 0; index < returned.size(); ++index) {
      if (!schema.returns()[index].alias_info()) {
        each_tensor(returned[index], [&](const at::Tensor& theirs) { targets.at(next++).copy_(theirs); });
      }
    }
  }

  bool has_tensors_in_returns() const {
    return std::any_of(schema_.returns().begin(), schema_.returns().end(), [](const auto& returned) {
      return has_tensors(returned.type());
    });
  }

  // What the kernel makes of zeros has the shapes, the strides and the types of what it will make. torch's kernels
  // for meta tensors say nearly the same, but not of norms in 16 bits, and take longer than small tensors do.
  Stack run_on_zeros(std::vector<std::pair<at::Tensor, at::Tensor>>& written) const {
    Stack made;
    for (size_t index = 0; index < num_; ++index) {
      const auto& argument = schema_.arguments()[index];
      if (args_[index].isDevice()) {
        made.emplace_back(c10::Device(c10::DeviceType::CPU));
        continue;
      }
      made.push_back(changed(args_[index], [&](const at::Tensor& tensor) {
        if (!is_here(tensor)) {
          return tensor;
        }
        auto zeros = zeros_like_on_cpu(tensor);
        if (is_written(argument)) {
          written.emplace_back(tensor, zeros);
        }
        return zeros;
      }));
    }
    op_.callBoxed(&made);
    return made;
  }

  // Draws for an operator that only fills a tensor, and launches the copy; the generator belongs to the host.
  bool draw_now() {
    size_t num_tensors = 0;
    for (const IValue& value : args_) {
      each_tensor(value, [&](const at::Tensor&) { ++num_tensors; });
    }
    if (num_tensors != 1 || !args_[0].isTensor() || !is_written(schema_.arguments()[0])) {
      return false;
    }
    const at::Tensor& ours = args_[0].toTensor();
    Stack cpu = on_cpu(false);
    auto drawn = at::empty_strided(ours.sizes(), ours.strides(), ours.scalar_type());
    cpu[0] = drawn;
    op_.callBoxed(&cpu);
    Locked locked(mutex());
    scheduler().launch(current_queue(device_), [target = same_memory(ours), drawn]() mutable {
      auto guard = plainly();
      target.copy_(drawn);
    });
    give({}, nullptr);
    return true;
  }

  // Puts the results on the caller's stack: written arguments, which are ours, and new tensors.
  void give(const Stack& returned, const Change& make) {
    Stack results;
    for (size_t index = 0; index < schema_.returns().size(); ++index) {
      const auto& type = schema_.returns()[index];
      if (type.alias_info()) {
        results.push_back(argument_like(type));
      } else {
        results.push_back(make ? changed(returned.at(index), make) : returned.at(index));
      }
    }
    stack_->erase(stack_->end() - num_, stack_->end());
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  IValue argument_like(const c10::Argument& returned) const {
    for (size_t index = 0; index < num_; ++index) {
      const auto* info = schema_.arguments()[index].alias_info();
      if (info && info->beforeSets() == returned.alias_info()->beforeSets()) {
        return args_[index];
      }
    }
    TORCH_CHECK(false, schema_, ": the emulated device knows no argument that is returned");
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t num_;
  Stack args_;
  int device_ = -1;
  bool has_tensor_ = false, is_random_ = false, written_ = false, makes_tensors_ = false;
};

inline void run_as_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, stack).run();
}

// ------------------------------------------------------------------------------------------------ copies

inline void count_copy(int device) {
  Locked locked(mutex());
  ++process().waits.copy;
  scheduler().finish(current_queue(device));
}

inline void launch_copy(Queue& queue, at::Tensor target, at::Tensor source) {
  scheduler().launch(queue, [target = std::move(target), source = std::move(source)]() mutable {
    auto guard = plainly();
    target.copy_(source);
  });
}

inline void copy_between_devices(const at::Tensor& source, const at::Tensor& target) {
  Locked locked(mutex());
  Queue& from = current_queue(source.device().index());
  Queue& to = current_queue(target.device().index());
  auto& late = scheduler();
  late.block(from, late.record(to));  // as CUDA: the target may still be in use
  launch_copy(from, same_memory(target), same_memory(source));
  late.block(to, late.record(from));
}

inline void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const int device = target.device().index();
  if (!non_blocking) {
    count_copy(device);
    same_memory(target).copy_(source);
    return;
  }
  Block* pinned = pinned_block(source.data_ptr());
  Locked locked(mutex());
  Queue& queue = current_queue(device);
  if (!pinned) {  // the driver copies it before it returns
    launch_copy(queue, same_memory(target), source.clone());
    return;
  }
  launch_copy(queue, same_memory(target), same_memory(source));
  pinned->uses.push_back(scheduler().record(queue));
}

inline void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const int device = source.device().index();
  Block* pinned = non_blocking ? pinned_block(target.data_ptr()) : nullptr;
  if (!pinned) {
    count_copy(device);
    target.copy_(same_memory(source));
    return;
  }
  Locked locked(mutex());
  Queue& queue = current_queue(device);
  auto& uses = pinned->uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](auto& mark) { return mark->is_reached; }), uses.end());
  if (scheduler().is_late() && uses.empty() && target.is_contiguous()) {
    std::memset(target.data_ptr(), kPoison, target.nbytes());
  }
  launch_copy(queue, same_memory(target), same_memory(source));
  uses.push_back(scheduler().record(queue));
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  initialize();
  auto guard = plainly();
  if (target.numel() == 0) {
    return target;
  }
  if (!is_here(source)) {
    copy_to_device(source.expand_as(target), target, non_blocking);
  } else if (!is_here(target)) {
    copy_to_host(source.expand_as(target), target, non_blocking);
  } else if (source.device() == target.device()) {
    Locked locked(mutex());
    launch_copy(current_queue(target.device().index()), same_memory(target), same_memory(source));
  } else {
    copy_between_devices(source, target);
  }
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// ------------------------------------------------------------------------------------------------ other kernels

inline at::Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      sizes, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type),
      format);
}

inline at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  return empty_on(Guard::index(c10::device_or_default(device)), sizes, strides, c10::dtype_or_default(type));
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto num_elements = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {num_elements}, {});
}

inline at::Tensor& set_nothing(at::Tensor& self) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, allocate_on(self.device().index(), 0), &device_allocator(), true);
  return at::native::set_storage_cpu_(self, at::Storage(std::move(storage)), 0, {0}, {});
}

// torch composes dropout of a fused kernel for devices, which rounds otherwise than what it uses on the CPU.
inline at::Tensor dropout(const at::Tensor& input, double share, bool train) {
  TORCH_CHECK(share >= 0 && share <= 1, "dropout probability has to be between 0 and 1, but got ", share);
  if (share == 0 || !train || input.numel() == 0) {
    return input;
  }
  if (share == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  return input * at::empty_like(input).bernoulli_(1 - share).div_(1 - share);
}

inline int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto guard = plainly();
  auto like = [](const at::Tensor& tensor) { return same_memory(tensor).set_requires_grad(tensor.requires_grad()); };
  std::optional<at::Tensor> mask_alias;
  if (mask && mask->defined()) {
    mask_alias = like(*mask);
  }
  return at::_fused_sdp_choice(
      like(query), like(key), like(value), mask_alias, dropout_p, is_causal, scale, enable_gqa);
}

// ------------------------------------------------------------------------------------------------ autocast

// The operators that autocast of the CPU runs in 16 bits, and those that it runs in the widest type of their
// arguments; what else it knows runs in float32.
inline const std::set<std::string> kIn16Bits = {
    "conv1d", "conv2d", "conv3d", "bmm", "mm", "linalg_vecdot", "baddbmm", "addmm", "_addmm_activation", "addbmm",
    "linear", "_convolution", "matmul", "conv_tbc", "mkldnn_rnn_layer", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "prelu", "scaled_dot_product_attention", "_native_multi_head_attention"};
inline const std::set<std::string> kInWidest = {"stack", "cat", "index_copy"};

template <int kBits>  // 16, 32, or 0 for the widest
void cast_and_call(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto in_16_bits = at::autocast::get_autocast_dtype(kType);
  auto args = stack->end() - op.schema().arguments().size();
  auto type = kBits == 32 ? at::kFloat : in_16_bits;
  if (kBits == 0) {
    std::for_each(args, stack->end(), [&](const IValue& value) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_here(tensor) && tensor.is_floating_point()) {
          type = c10::promoteTypes(type, tensor.scalar_type());
        }
      });
    });
  }
  std::transform(args, stack->end(), args, [&](const IValue& value) {
    return changed(value, [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(type, tensor, kType);
    });
  });
  op.callBoxed(stack);
}

// ------------------------------------------------------------------------------------------------ registration

// Views share memory, which `run_as_on_cpu` cannot do: a view that has no kernel here is an error.
inline bool returns_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& returned) {
    return returned.alias_info() && !returned.alias_info()->isWrite();
  });
}

inline void register_kernels() {
  static torch::Library of_device(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static torch::Library of_autograd(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  static torch::Library of_autocast(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  static torch::Library of_all_autocast(
      torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  of_all_autocast.fallback(torch::CppFunction::makeFallthrough());

  std::set<std::string> own;
  auto add = [&](const char* name, auto&& function) {
    of_device.impl(name, std::forward<decltype(function)>(function));
    own.insert(name);
  };
  add("empty.memory_format", TORCH_FN(empty));
  add("empty_strided", TORCH_FN(empty_strided));
  add("_copy_from", TORCH_FN(copy_from));
  add("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  add("resize_", TORCH_FN(resize_to));
  add("record_stream", TORCH_FN(record_stream));
  add("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  add("view", TORCH_FN(at::native::view));
  add("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  add("unfold", TORCH_FN(at::native::unfold));
  add("view_as_real", TORCH_FN(at::native::view_as_real));
  add("view_as_complex", TORCH_FN(at::native::view_as_complex));
  add("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  add("set_.source_Storage", TORCH_FN(set_storage));
  add("set_", TORCH_FN(set_nothing));
  add("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  of_device.impl("dropout", TORCH_FN(dropout));
  of_autograd.impl("dropout", TORCH_FN(dropout));

  const std::set<std::string> composed_elsewhere = {"convolution", "convolution_backward"};
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) {
      continue;
    }
    std::string base = name.name.substr(6);
    std::string full = name.overload_name.empty() ? base : base + "." + name.overload_name;
    const bool is_on_cpu = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || composed_elsewhere.count(full);
    if (is_on_cpu && !own.count(full) && !returns_view(op->schema()) && base.rfind("_nested", 0) != 0) {
      of_device.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_as_on_cpu>());
    }
    if (op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) {
      auto function = kIn16Bits.count(base) ? torch::CppFunction::makeFromBoxedFunction<&cast_and_call<16>>()
          : kInWidest.count(base)           ? torch::CppFunction::makeFromBoxedFunction<&cast_and_call<0>>()
                                            : torch::CppFunction::makeFromBoxedFunction<&cast_and_call<32>>();
      of_autocast.impl(full.c_str(), std::move(function));
    }
  }
}

}  // namespace emulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::choose_attention)
}
