// Collectives between processes whose tensors are on emulated devices, over gloo.
//
// As with NCCL, a collective runs on a stream of its own, after the work that the caller's stream had so far. It
// begins when it is launched, on copies of its inputs: for them, what the caller's stream has is run. Its outputs are
// filled when their stream comes to it. `wait` lets the caller's stream wait, and never the host.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "kernels.hpp"

namespace emulated {

using Tensors = std::vector<at::Tensor>;

class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, int device, MarkPtr done, Tensors held, Tensors outputs)
      : c10d::Work(rank, type), device_(device), done_(std::move(done)), held_(std::move(held)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kType, device)});
    future_->markCompleted(IValue(outputs));  // its values come when the current stream, the group's, is there
  }

  bool isCompleted() override {
    Locked locked(mutex());
    return scheduler().query(done_);
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    Locked locked(mutex());
    scheduler().block(current_queue(device_), done_);
    held_.clear();  // whatever is done with them now comes after the collective
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  bool is_over() const {
    return done_->is_reached;
  }

 private:
  int device_;
  MarkPtr done_;
  Tensors held_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group final : public c10d::Backend {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "emulated";
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch(c10d::OpType::BROADCAST, tensors, tensors, [&](Tensors& in, Tensors& out) {
      return gloo_->broadcast(out, options);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch(c10d::OpType::ALLREDUCE, tensors, tensors, [&](Tensors& in, Tensors& out) {
      return gloo_->allreduce(out, options);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors, tensors, [&](Tensors& one, Tensors&) { return allreduce(one, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(c10d::OpType::REDUCE, tensors, tensors, [&](Tensors& in, Tensors& out) {
      return gloo_->reduce(out, options);
    });
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::ALLGATHER, inputs, outputs.at(0), [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return gloo_->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
      at::Tensor all = out[0].view(-1), own = in[0].view(-1);  // gloo divides the first dimension
      return gloo_->_allgather_base(all, own, options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return each(outputs, inputs, [&](Tensors& output, Tensors& input) {
      return _allgather_base(output[0], input[0], options);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return launch(
        c10d::OpType::GATHER, inputs, outputs.empty() ? Tensors{} : outputs[0], [&](Tensors& in, Tensors& out) {
          std::vector<Tensors> lists;
          if (!outputs.empty()) {
            lists.push_back(out);
          }
          return gloo_->gather(lists, in, options);
        });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return launch(
        c10d::OpType::SCATTER, inputs.empty() ? Tensors{} : inputs[0], outputs, [&](Tensors& in, Tensors& out) {
          std::vector<Tensors> lists;
          if (!inputs.empty()) {
            lists.push_back(in);
          }
          return gloo_->scatter(out, lists, options);
        });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto sum = options;
    const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;  // which gloo lacks
    sum.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    return launch(
        c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output},
        [&](Tensors& in, Tensors& out) { return gloo_->_reduce_scatter_base(out[0], in[0], sum); },
        is_mean ? size_ : 1);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return each(outputs, inputs, [&](Tensors& output, Tensors& input) {
      return _reduce_scatter_base(output[0], input[0], options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return launch(c10d::OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
      return gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = gloo_->barrier(options);
    work->wait();
    return work;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return number_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }

 private:
  using Start = std::function<WorkPtr(Tensors&, Tensors&)>;

  // Launches a collective for each tensor; the last one's end is the end of all, since they share a stream.
  static WorkPtr each(Tensors& outputs, Tensors& inputs, const Start& start) {
    WorkPtr last;
    for (size_t index = 0; index < inputs.size(); ++index) {
      Tensors output{outputs[index]}, input{inputs[index]};
      last = start(output, input);
    }
    return last;
  }

  WorkPtr launch(
      c10d::OpType type, const Tensors& inputs, const Tensors& outputs, const Start& start, int divisor = 1) {
    initialize();
    ++number_;
    auto& late = scheduler();
    const int device = (inputs.empty() ? outputs : inputs).at(0).device().index();
    Tensors in, out;
    {
      Locked locked(mutex());
      late.finish(current_queue(device));
      auto guard = plainly();
      for (const auto& tensor : inputs) {
        in.push_back(same_memory(tensor).clone(at::MemoryFormat::Contiguous));
      }
      for (const auto& tensor : outputs) {
        out.push_back(same_memory(tensor).clone(at::MemoryFormat::Contiguous));
      }
    }
    auto exchange = start(in, out);  // without the mutex: gloo may block until other processes are there
    Locked locked(mutex());
    Queue& queue = late.queue(device, kStream);
    late.block(queue, late.record(current_queue(device)));
    Tensors targets;
    for (const auto& tensor : outputs) {
      targets.push_back(same_memory(tensor));
    }
    late.launch(queue, [=]() mutable {
      exchange->wait();
      auto guard = plainly();
      for (size_t index = 0; index < targets.size(); ++index) {
        targets[index].copy_(divisor > 1 ? out[index].div_(divisor) : out[index]);
      }
    });
    Tensors held = inputs;
    held.insert(held.end(), outputs.begin(), outputs.end());
    const int64_t before = std::exchange(current().stream[device], kStream);
    auto work = c10::make_intrusive<Work>(rank_, type, device, late.record(queue), std::move(held), outputs);
    current().stream[device] = before;
    works_.erase(
        std::remove_if(works_.begin(), works_.end(), [](auto& one) { return one->is_over(); }), works_.end());
    works_.push_back(work);
    return work;
  }

  static constexpr int64_t kStream = 50;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::vector<c10::intrusive_ptr<Work>> works_;  // keeps the memory of collectives that nobody waits for
  uint64_t number_ = 0;
};

// What DDP needs to tell how long its phases take.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override {
    return std::nullopt;
  }
};

}  // namespace emulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, emulated::kType, emulated::Timer)
}
