// Tells torch of the emulated device when it is imported, and gives Python what torch has no call for.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "group.hpp"

namespace emulated {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return process().is_initialized;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(process().num_devices);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current().device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice(c10::Device(kType, device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(kType, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current().device : device);
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned_block(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

static void set_order(const std::string& name, uint64_t seed) {
  static const std::map<std::string, Order> by_name = {
      {"now", Order::now},
      {"last", Order::last},
      {"main_first", Order::main_first},
      {"side_first", Order::side_first},
      {"random", Order::random}};
  Locked locked(mutex());
  scheduler().order = by_name.at(name);
  scheduler().random.seed(seed);
}

static std::map<std::string, int64_t> waits() {
  Locked locked(mutex());
  const auto& counted = process().waits;
  return {{"item", counted.item},   {"copy", counted.copy},     {"shape", counted.shape},
          {"event", counted.event}, {"stream", counted.stream}, {"device", counted.device}};
}

}  // namespace emulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace emulated;
  c10::SetAllocator(kType, &device_allocator());
  c10::impl::registerDeviceGuard(kType, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_kernels();
  pthread_atfork(nullptr, nullptr, &after_fork);

  module.def("set_order", &set_order);
  module.def("waits", &waits);
  module.def("is_initialized", [] { return process().is_initialized; });
  module.def("is_bad_fork", [] { return process().is_bad_fork; });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("set_memory_limit", [](int device, size_t num_bytes) {
    Locked locked(mutex());
    memory().limit[device] = num_bytes;
  });
  module.def("set_num_devices", [](int count) {
    TORCH_CHECK(0 < count && count <= kMaxDevices && !process().is_initialized);
    process().num_devices = count;
  });
  module.def("over_gloo", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(std::move(gloo));
  });
}
