//! Writes `volta_fa_options.h`: the C++ view of the option list (src/options.rs).

use crate::options::{Kind, OptionArgs, Row, OPTIONS};
use anyhow::Result;
use std::path::Path;

/// What C++ calls an option of this kind: as a parameter, in the C ABI, in the schema.
struct Spelling {
    parameter: &'static str,
    member: &'static str,
    c: &'static str,
    schema: &'static str,
    /// makes the C value of the parameter (torch_ops/arguments.h)
    to_c: &'static str,
    /// takes a saved value out of its IValue
    restore: &'static str,
}

fn spelling(kind: Kind) -> Spelling {
    let (parameter, member, c, schema, to_c, restore) = match kind {
        Kind::Tensor | Kind::Differentiable => ("const OptionalTensor &", "OptionalTensor ", "void *", "Tensor?", "handle", ""),
        Kind::OptionalInt => {
            ("std::optional<Int> ", "std::optional<Int> ", "MaybeInt ", "SymInt?", "maybe", "template to<std::optional<Int>>()")
        }
        Kind::Int => ("Int ", "Int ", "int64_t ", "SymInt", "known", "template to<Int>()"),
        Kind::OptionalFloat => {
            ("std::optional<double> ", "std::optional<double> ", "MaybeFloat ", "float?", "maybe", "template to<std::optional<double>>()")
        }
        Kind::Float => ("double ", "double ", "double ", "float", "", "toDouble()"),
        Kind::Bool => ("bool ", "bool ", "bool ", "bool", "", "toBool()"),
    };
    Spelling { parameter, member, c, schema, to_c, restore }
}

fn is_tensor(row: &Row) -> bool {
    matches!(row.kind, Kind::Tensor | Kind::Differentiable)
}

/// `f` of each row that `which` takes, between commas.
fn list(which: impl Fn(&Row) -> bool, f: impl Fn(&Row) -> String) -> String {
    OPTIONS.iter().filter(|row| which(row)).map(f).collect::<Vec<_>>().join(", ")
}

/// `f` of each row that `which` takes, a line each.
fn lines(which: impl Fn(&Row) -> bool, f: impl Fn(&Row) -> String) -> String {
    OPTIONS.iter().filter(|row| which(row)).map(|row| format!("    {}\n", f(row))).collect()
}

fn default(row: &Row) -> &'static str {
    match row.default {
        "false" => "False",
        "true" => "True",
        other => other,
    }
}

pub fn write_header(path: &Path) -> Result<()> {
    let all = |_: &Row| true;
    let parameters = list(all, |row| format!("{}{}", spelling(row.kind).parameter, row.name));
    let header = format!(
        "// generated from src/options.rs by tools/build/options.rs: do not edit
#pragma once

#include \"arguments.h\"

// The options of a call on their way to Rust.
struct OptionArgs {{
{c_fields}}};
static_assert(sizeof(OptionArgs) == {c_size}, \"Rust and C++ disagree about OptionArgs\");

namespace volta_fa {{

// The options as C++ parameters, as arguments and in the schema. Int is c10::SymInt above the backends and int64_t in them.
#define VOLTA_FA_OPTION_PARAMETERS(Int) {parameters}
#define VOLTA_FA_OPTION_ARGUMENTS {arguments}
#define VOLTA_FA_OPTION_SCHEMA \"{schema}\"
// Those that may need a gradient.
#define VOLTA_FA_DIFFERENTIABLE_OPTIONS {differentiable}
#define VOLTA_FA_DIFFERENTIABLE_MEMBERS(options) {differentiable_members}

template <class Int>
OptionArgs option_args(VOLTA_FA_OPTION_PARAMETERS(Int)) {{
    return {{{to_c}}};
}}

// fwd's inputs, numbered as in its schema.
struct FwdInput {{
    enum : size_t {{ q, k, v, {arguments}, generator, count }};
}};

// What autograd saves of a call: tensors by number, the rest by name.
struct SavedTensor {{
    enum : size_t {{ q, k, v, out, softmax_lse, rng_state, {tensor_names}, count }};
}};
#define VOLTA_FA_TENSOR_OPTIONS {tensor_names}

template <class Map, class Int = c10::SymInt>
void save_options(Map &saved, VOLTA_FA_OPTION_PARAMETERS(Int)) {{
{save}}}

// The options by name, with the schema's defaults.
template <class Int>
struct Options {{
{members}}};
#define VOLTA_FA_OPTION_MEMBERS(options) {member_arguments}

// `tensors` are those of SavedTensor.
template <class Map, class Tensors, class Int = c10::SymInt>
Options<Int> saved_options(Map &saved, const Tensors &tensors) {{
    Options<Int> options;
{restore}    return options;
}}

}}  // namespace volta_fa
",
        c_fields = lines(all, |row| format!("{}{};", spelling(row.kind).c, row.name)),
        c_size = size_of::<OptionArgs>(),
        arguments = list(all, |row| row.name.into()),
        schema = list(all, |row| format!("{} {}={}", spelling(row.kind).schema, row.name, default(row))),
        differentiable = list(|row| row.kind == Kind::Differentiable, |row| row.name.into()),
        differentiable_members = list(|row| row.kind == Kind::Differentiable, |row| format!("&options.{}", row.name)),
        to_c = list(all, |row| format!("{}({})", spelling(row.kind).to_c, row.name)),
        tensor_names = list(is_tensor, |row| row.name.into()),
        save = lines(|row| !is_tensor(row), |row| format!("saved[\"{0}\"] = {0};", row.name)),
        members = lines(all, |row| match row.default {
            "None" => format!("{}{};", spelling(row.kind).member, row.name),
            default => format!("{}{} = {default};", spelling(row.kind).member, row.name),
        }),
        member_arguments = list(all, |row| format!("options.{}", row.name)),
        restore = lines(all, |row| match is_tensor(row) {
            true => format!("options.{0} = optional(tensors[SavedTensor::{0}]);", row.name),
            false => format!("options.{0} = saved[\"{0}\"].{1};", row.name, spelling(row.kind).restore),
        }),
    );
    if std::fs::read_to_string(path).ok().as_ref() != Some(&header) {
        std::fs::write(path, header)?;
    }
    Ok(())
}
