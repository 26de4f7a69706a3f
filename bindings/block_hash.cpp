// Block keys in kvspan._core; kvspan.ops documents the functions.
#include "kvspan/block_hash.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "kvspan/check.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace kvspan::bindings {
namespace {

constexpr auto kDigestBytes = static_cast<std::int64_t>(sizeof(Digest));

py::bytes to_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

Digest to_digest(std::string_view bytes, std::string_view name) {
  Digest digest;
  KVSPAN_CHECK_ARG(bytes.size() == digest.size(), name, ": expected ", digest.size(),
                   " bytes, got ", bytes.size());
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  return digest;
}

// An integer; exact ones, which nearly all are, without pybind11's detours.
std::int64_t to_int64(PyObject* number) {
  if (PyLong_CheckExact(number)) {
    const std::int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }
  return py::handle(number).cast<std::int64_t>();
}

// Calls visit(index, items) for each item of a sequence of tuples or lists of a length; false where
// it is something else.
template <typename Visit>
bool for_each_row(py::handle rows, Py_ssize_t length, const Visit& visit) {
  if (!PySequence_Check(rows.ptr())) return false;
  const auto outer = py::reinterpret_steal<py::object>(PySequence_Fast(rows.ptr(), ""));
  if (!outer) throw py::error_already_set();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(outer.ptr()); ++i) {
    PyObject* row = PySequence_Fast_GET_ITEM(outer.ptr(), i);
    if (!PySequence_Check(row)) return false;
    const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(row, ""));
    if (!items) throw py::error_already_set();
    if (PySequence_Fast_GET_SIZE(items.ptr()) != length) return false;
    visit(i, PySequence_Fast_ITEMS(items.ptr()));
  }
  return true;
}

// Pairs of integers, or an int64 array [num_spans, 2].
std::vector<SpanRange> to_spans(py::handle pairs) {
  std::vector<SpanRange> spans;
  if (py::isinstance<py::array_t<std::int64_t>>(pairs)) {
    const auto array = py::reinterpret_borrow<py::array_t<std::int64_t>>(pairs);
    if (array.ndim() == 2 && array.shape(1) == 2) {
      const auto rows = array.unchecked<2>();
      for (py::ssize_t i = 0; i < rows.shape(0); ++i) spans.emplace_back(rows(i, 0), rows(i, 1));
      return spans;
    }
  }
  bool well_formed = false;
  try {
    well_formed = for_each_row(pairs, 2, [&](Py_ssize_t, PyObject** row) {
      spans.emplace_back(to_int64(row[0]), to_int64(row[1]));
    });
  } catch (const py::cast_error&) {
  } catch (py::error_already_set& error) {  // an integer beyond 64 bits
    if (!error.matches(PyExc_OverflowError)) throw;
  }
  KVSPAN_CHECK(well_formed, TypeError,
               "spans: expected a sequence of (start, end) pairs of integers");
  return spans;
}

std::vector<ExtraRange> to_extra(py::handle triples) {
  std::vector<ExtraRange> extra;
  bool well_formed = false;
  try {
    well_formed = for_each_row(triples, 3, [&](Py_ssize_t i, PyObject** row) {
      if (!PyBytes_Check(row[2])) throw py::cast_error();
      const auto digest = py::reinterpret_borrow<py::bytes>(row[2]);
      extra.push_back(
          {to_int64(row[0]), to_int64(row[1]), to_digest(digest, concat("extra[", i, "].digest"))});
    });
  } catch (const py::cast_error&) {
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_OverflowError)) throw;
  }
  KVSPAN_CHECK(well_formed, TypeError,
               "extra: expected a sequence of (start, end, digest): two integers and bytes");
  return extra;
}

py::array_t<std::uint8_t> make_keys(std::int64_t num_keys) {
  return py::array_t<std::uint8_t>({num_keys, kDigestBytes});
}

std::span<std::uint8_t> bytes_of(py::array_t<std::uint8_t>& keys) {
  return {keys.mutable_data(), static_cast<std::size_t>(keys.size())};
}

py::array_t<std::uint8_t> extend(BlockChain& chain, py::handle token_ids, py::handle span_pairs,
                                 py::handle extra_ranges) {
  const BorrowedTensor tokens(token_ids, "token_ids");
  const auto spans = to_spans(span_pairs);
  const auto extra = to_extra(extra_ranges);
  const auto& view = tokens.view();
  auto keys = make_keys(chain.num_new_blocks(view.ndim == 1 ? view.shape[0] : 0));
  const auto out = bytes_of(keys);
  const py::gil_scoped_release release;
  chain.extend(view, spans, extra, out);
  return keys;
}

py::tuple extend_batch(const std::vector<BlockChain*>& chains, py::handle token_ids,
                       py::handle cu_seqlens, py::handle span_pairs, py::handle cu_spans,
                       py::handle extra_ranges, py::handle cu_extra, int num_threads) {
  const BorrowedTensor tokens(token_ids, "token_ids");
  const BorrowedTensor seqlens(cu_seqlens, "cu_seqlens");
  const BorrowedTensor span_offsets(cu_spans, "cu_spans");
  const BorrowedTensor extra_offsets(cu_extra, "cu_extra");
  const auto spans = to_spans(span_pairs);
  const auto extra = to_extra(extra_ranges);
  const ExtendArgs args{.chains = chains,
                        .token_ids = tokens.view(),
                        .cu_seqlens = int64_elements(seqlens.view(), "cu_seqlens"),
                        .spans = spans,
                        .cu_spans = int64_elements(span_offsets.view(), "cu_spans"),
                        .extra = extra,
                        .cu_extra = int64_elements(extra_offsets.view(), "cu_extra"),
                        .num_threads = num_threads};
  const std::vector<std::int64_t> offsets = key_offsets(args);
  auto keys = make_keys(offsets.back());
  const auto out = bytes_of(keys);
  {
    const py::gil_scoped_release release;
    extend_chains(args, out);
  }
  return py::make_tuple(
      keys, py::array_t<std::int64_t>(static_cast<py::ssize_t>(offsets.size()), offsets.data()));
}

}  // namespace

void bind_block_hash(py::module_& m) {
  py::class_<TokenStore, std::shared_ptr<TokenStore>>(m, "TokenStore")
      .def(py::init<>())
      .def("clear", &TokenStore::clear, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_entries", &TokenStore::num_entries)
      .def_property_readonly("num_bytes", &TokenStore::num_bytes)
      .def_property_readonly("num_collisions", &TokenStore::num_collisions);

  py::class_<BlockChain>(m, "BlockChain")
      .def(py::init([](std::int64_t block_size, const py::bytes& root, const py::bytes& span_root,
                       bool anchored, std::string_view isa, std::shared_ptr<TokenStore> store) {
             return std::make_unique<BlockChain>(block_size, to_digest(root, "root"),
                                                 to_digest(span_root, "span_root"), anchored,
                                                 parse_sha256_isa(isa), std::move(store));
           }),
           py::arg("block_size"), py::kw_only(), py::arg("root"), py::arg("span_root"),
           py::arg("anchored"), py::arg("isa"), py::arg("store").none(true))
      .def("extend", &extend, py::arg("token_ids"), py::arg("spans"), py::arg("extra"))
      .def_property_readonly("block_size", &BlockChain::block_size)
      .def_property_readonly("num_tokens", &BlockChain::num_tokens)
      .def_property_readonly("digest",
                             [](const BlockChain& chain) { return to_bytes(chain.digest()); });

  m.def("extend_chains", &extend_batch, py::arg("chains"), py::arg("token_ids"),
        py::arg("cu_seqlens"), py::arg("spans"), py::arg("cu_spans"), py::arg("extra"),
        py::arg("cu_extra"), py::arg("num_threads"));
  m.def("built_with_xxhash", &built_with_xxhash);
}

}  // namespace kvspan::bindings
