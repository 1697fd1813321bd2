// The device "standin": an accelerator with memory of its own, computed by the kernels of the CPU.
//
// Every operation on the device runs the CPU kernel on tensors that alias device memory, so that views and in-place
// operations behave as on a GPU. Mixed devices, CPU generators and integer matrix products raise, as on CUDA. A listener
// receives copies between host and device and operations that wait for the device. `accelerator.py` builds and loads
// this file; the functions at its end are called through ctypes. No Python headers are needed, which halves the time of
// the build.
#include <torch/library.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

// Declared in ATen/autocast_mode.h, which includes the declarations of all operators and takes ten seconds to compile.
namespace at::autocast {
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(c10::DeviceType device_type);
}

namespace {

using at::Tensor;
using torch::jit::Stack;

constexpr auto kStandin = c10::DeviceType::PrivateUse1;
const c10::Device standin(kStandin, 0);
const c10::DispatchKeySet device_keys(c10::DispatchKey::PrivateUse1);

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kStandin; }

// Counts and events

using Listener = void (*)(const char* kind, const char* cause, int64_t bytes);
std::atomic<Listener> listener{nullptr};
std::atomic<int64_t> kernels{0};

void notify(const char* kind, const std::string& cause, int64_t bytes = 0) {
  if (auto call = listener.load()) call(kind, cause.c_str(), bytes);
}

// Memory: new allocations hold NaN in every floating-point dtype, so that reading uninitialised values is noticed.

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, standin};
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "standin: out of memory");
    std::memset(data, 0xFF, bytes);
    add(data, bytes);
    return {data, data, &release, standin};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }

  static void release(void* data) {
    subtract(data);
    std::free(data);
  }
  static void add(void* data, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    sizes[data] = bytes;
    current += static_cast<int64_t>(bytes);
    peak = std::max(peak, current);
  }
  static void subtract(void* data) {
    std::lock_guard<std::mutex> guard(mutex);
    auto entry = sizes.find(data);
    if (entry == sizes.end()) return;
    current -= static_cast<int64_t>(entry->second);
    sizes.erase(entry);
  }

  static inline std::mutex mutex;
  static inline std::unordered_map<void*, size_t> sizes;
  static inline int64_t current = 0, peak = 0;
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "standin: out of memory");
    std::lock_guard<std::mutex> guard(mutex);
    pages.insert(data);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }

  static void release(void* data) {
    std::lock_guard<std::mutex> guard(mutex);
    pages.erase(data);
    std::free(data);
  }
  static bool contains(const void* data) {
    std::lock_guard<std::mutex> guard(mutex);
    return pages.count(data) > 0;
  }

  static inline std::mutex mutex;
  static inline std::unordered_set<const void*> pages;
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

// One device with one stream. Nothing is asynchronous, so that events are always complete.

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStandin; }
  c10::Device exchangeDevice(c10::Device) const override { return standin; }
  c10::Device getDevice() const override { return standin; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, standin); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, standin); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, standin); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return c10::Stream(c10::Stream::DEFAULT, standin); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override { notify("wait", "Event.synchronize"); }
  void synchronizeStream(const c10::Stream&) const override { notify("wait", "Stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { notify("wait", "synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

struct DeviceHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::contains(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = device_memory.allocate(bytes);
    std::memcpy(data.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Device tensors and their aliases on the host

bool supports_double = true;

void require_dtype(at::ScalarType dtype) {
  TORCH_CHECK(supports_double || dtype != at::kDouble, "standin: this device does not support float64");
}

Tensor with_layout_of(Tensor tensor, const Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// A CPU tensor that does not own its memory.
Tensor host_alias(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  c10::Storage shared(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  with_layout_of(alias, tensor);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// Device memory that keeps the CPU tensor alive whose result it is.
c10::DataPtr adopted(const Tensor& host) {
  auto* owner = new Tensor(host);
  void* data = const_cast<void*>(host.storage().data());
  DeviceMemory::add(owner, host.storage().nbytes());
  return {data, owner, [](void* owner) {
            DeviceMemory::subtract(owner);
            delete static_cast<Tensor*>(owner);
          }, standin};
}

Tensor to_device(const Tensor& host) {
  require_dtype(host.scalar_type());
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), adopted(host), &device_memory, true);
  return with_layout_of(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), device_keys, host.dtype()), host);
}

// The boxed kernel of all operations

const std::unordered_set<std::string> waiting_operations = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::equal", "aten::repeat_interleave", "aten::_linalg_eigh", "aten::_linalg_svd",
    "aten::linalg_qr", "aten::linalg_lu_factor_ex", "aten::linalg_cholesky_ex", "aten::geqrf"};

const std::unordered_set<std::string> products = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot", "aten::convolution"};

// Applies `function` to each tensor in an argument or result, including those in lists.
template <typename Function>
void for_tensors(c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    value = std::move(tensors);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    value = std::move(tensors);
  }
}

class HostCall {
 public:
  HostCall(const c10::OperatorHandle& operation, Stack* stack)
      : operation_(operation), name_(operation.schema().name()), stack_(stack) {}

  void run() {
    arguments_to_host();
    if (!returns_view()) kernels++;
    // The operation `index` calls `nonzero` first if it has a mask.
    if (waiting_operations.count(name_) || (boolean_index_ && name_ != "aten::index")) notify("wait", name_);
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      operation_.callBoxed(stack_);
    }
    update_resized();
    auto count = operation_.schema().returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); i++)
      for_tensors((*stack_)[i], [this](const Tensor& tensor) { return result(tensor); });
  }

 private:
  void arguments_to_host() {
    const auto& arguments = operation_.schema().arguments();
    auto first = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& value = (*stack_)[first + i];
      computes_on_device_ |= value.isDevice() && value.toDevice().type() == kStandin;
      for_tensors(value, [this](const Tensor& tensor) { return computes_on_device_ |= on_device(tensor), tensor; });
    }
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& value = (*stack_)[first + i];
      if (value.isDevice() && value.toDevice().type() == kStandin) value = c10::Device(c10::kCPU);
      TORCH_CHECK(!value.isGenerator() || !computes_on_device_ || value.toGenerator().device().type() != c10::kCPU,
                  "standin: expected a generator of this device, found one of the CPU in ", name_);
      const bool index = value.isOptionalTensorList();
      for_tensors(value, [&](const Tensor& tensor) { return argument(tensor, arguments[i].name(), index); });
    }
  }

  Tensor argument(const Tensor& tensor, const std::string& name, bool index) {
    if (!tensor.defined()) return tensor;
    boolean_index_ |= index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    if (on_device(tensor)) {
      TORCH_CHECK(!products.count(name_) || tensor.is_floating_point() || tensor.is_complex(),
                  "standin: ", name_, " is not implemented for ", tensor.dtype());
      aliases_.emplace_back(tensor, host_alias(tensor));
      return aliases_.back().second;
    }
    if (tensor.dim() == 0) return tensor;  // scalars may be on the CPU, as on CUDA
    TORCH_CHECK(index, "standin: expected all tensors on the device, found ", tensor.sizes(), " on ", tensor.device(),
                " for ", name, " of ", name_, ".", operation_.schema().overload_name());
    notify("upload", name_ + " with indices on the CPU", static_cast<int64_t>(tensor.nbytes()));
    return tensor;
  }

  bool returns_view() const {
    for (const auto& value : operation_.schema().returns())
      if (value.alias_info() && !value.alias_info()->isWrite()) return true;
    return false;
  }

  // An operation with an `out` argument, or in place, may have changed the shape or the memory of a tensor.
  void update_resized() {
    for (auto& [tensor, alias] : aliases_) {
      if (tensor.storage().data() != alias.storage().data()) {
        auto* storage = tensor.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(adopted(alias));
        storage->set_nbytes(alias.storage().nbytes());
      }
      if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides() ||
          tensor.storage_offset() != alias.storage_offset())
        with_layout_of(tensor, alias);
    }
  }

  Tensor result(const Tensor& host) const {
    if (!host.defined() || !computes_on_device_) return host;
    for (const auto& [tensor, alias] : aliases_)
      if (alias.is_same(host)) return tensor;
    for (const auto& [tensor, alias] : aliases_)
      if (alias.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return with_layout_of(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                                       tensor.key_set(), host.dtype()), host);
    return to_device(host);
  }

  const c10::OperatorHandle& operation_;
  const std::string name_;
  Stack* stack_;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // device tensor, its alias on the host
  bool computes_on_device_ = false, boolean_index_ = false;
};

void compute_on_host(const c10::OperatorHandle& operation, Stack* stack) { HostCall(operation, stack).run(); }

c10::OperatorHandle find(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// torch calls its own operators for convolutions on other devices.
void convolution(const c10::OperatorHandle&, Stack* stack) { HostCall(find("aten::convolution"), stack).run(); }

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  const auto weight = (*stack)[stack->size() - 8].toTensor();
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{weight.size(0)}));  // the shape of the bias
  HostCall(find("aten::convolution_backward"), stack).run();
}

// Operations with kernels of their own

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  require_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, device_keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  require_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           device_keys, c10::dtype_or_default(dtype));
}

// Forward-mode differentiation represents zero tangents without memory.
Tensor zero_tensor(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                   std::optional<at::Device>, std::optional<bool>) {
  static at::native::ZeroTensorAllocator no_memory(standin);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &no_memory,
                                   device_keys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const auto bytes = static_cast<int64_t>(source.numel() * source.element_size());
  if (!on_device(source)) {
    notify("upload", non_blocking ? "copy, non-blocking" : "copy", bytes);
  } else if (!on_device(target)) {
    notify("download", non_blocking ? "copy, non-blocking" : "copy", bytes);
    if (!non_blocking) notify("wait", "copy to the CPU");
  } else {
    kernels++;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto host = on_device(target) ? host_alias(target) : target;
  host.copy_(on_device(source) ? host_alias(source) : source);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const Tensor& tensor) {
  notify("wait", "item");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return host_alias(tensor).item();
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const auto bytes = (impl->storage_offset() + tensor.numel()) * tensor.element_size();
  if (bytes > tensor.storage().nbytes()) DeviceHooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  return tensor;
}

int64_t attention_kernel = 0;  // a value of torch.nn.attention.SDPBackend

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return attention_kernel;
}

// Autocast: casts the floating-point arguments, then calls the operation without autocast.

template <bool lower>
void autocast_to(const c10::OperatorHandle& operation, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = lower ? at::autocast::get_autocast_dtype(kStandin) : at::kFloat;
  auto first = stack->size() - operation.schema().arguments().size();
  for (size_t i = first; i < stack->size(); i++)
    for_tensors((*stack)[i], [&](const Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kStandin) : tensor;
    });
  operation.callBoxed(stack);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zero_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The operations of CUDA's lists that models use.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"conv1d", "conv2d", "conv3d", "convolution", "_convolution", "addmm", "addmv", "addr", "matmul",
                           "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "linalg_vecdot",
                           "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_to<true>>());
  for (const char* name : {"exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar",
                           "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
                           "cosine_similarity", "nll_loss", "kl_div", "mse_loss", "logsumexp", "prod", "prod.dim_int",
                           "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum",
                           "sum.dim_IntList", "norm.Scalar", "norm.ScalarOpt_dim"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_to<false>>());
}

// Called through ctypes

extern "C" {
void standin_register() {
  static DeviceHooks hooks;
  c10::SetAllocator(kStandin, &device_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void standin_listen(Listener call) { listener = call; }
int64_t standin_kernels() { return kernels; }
void standin_support_double(bool value) { supports_double = value; }
void standin_attention(int64_t kernel) { attention_kernel = kernel; }
int64_t standin_allocated() { return DeviceMemory::current; }
int64_t standin_peak() { return DeviceMemory::peak; }
void standin_reset_peak() { DeviceMemory::peak = DeviceMemory::current; }
}
