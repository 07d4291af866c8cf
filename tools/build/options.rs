//! Writes `volta_fa_options.h`, the C++ form of the option lists (src/options.rs).

use crate::options::{
    FastOptionArgs, Kind, KvCacheOptionArgs, MlaOptionArgs, OptionArgs, PrepareOptionArgs, Row, FAST_OPTIONS, KVCACHE_OPTIONS, MLA_OPTIONS,
    OPTIONS, PREPARE_OPTIONS,
};
use anyhow::Result;
use std::path::Path;

/// C++ types of an option kind: as parameter, as member, in the C ABI and in the schema.
struct Spelling {
    parameter: &'static str,
    member: &'static str,
    c: &'static str,
    schema: &'static str,
    /// Function that converts the parameter to its C value (torch_ops/arguments.h).
    to_c: &'static str,
    /// Method of IValue that returns a saved value.
    restore: &'static str,
}

fn spelling(kind: Kind) -> Spelling {
    let (parameter, member, c, schema, to_c, restore) = match kind {
        Kind::Tensor | Kind::Differentiable | Kind::Written => {
            ("const OptionalTensor &", "OptionalTensor ", "void *", "Tensor?", "handle", "")
        }
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
    matches!(row.kind, Kind::Tensor | Kind::Differentiable | Kind::Written)
}

/// An option list and the C++ names for it.
struct List {
    rows: &'static [Row],
    /// Struct of the C ABI; `args_size` is its size in Rust.
    args: &'static str,
    args_size: usize,
    /// Function that fills the struct.
    fill: &'static str,
    /// Struct of the options by name.
    members: &'static str,
    /// Prefix of the macros.
    macros: &'static str,
}

impl List {
    /// Returns `f` of each row for which `which` is true, separated by commas.
    fn list(&self, which: impl Fn(&Row) -> bool, f: impl Fn(&Row) -> String) -> String {
        self.rows.iter().filter(|row| which(row)).map(f).collect::<Vec<_>>().join(", ")
    }

    /// Returns `f` of each row for which `which` is true, one per line.
    fn lines(&self, which: impl Fn(&Row) -> bool, f: impl Fn(&Row) -> String) -> String {
        self.rows.iter().filter(|row| which(row)).map(|row| format!("    {}\n", f(row))).collect()
    }

    /// Returns the schema of an overload that writes into options of the kind Written. The op's own arguments have the alias sets a and b.
    fn writing_schema(&self) -> String {
        let written = |row: &Row| self.rows.iter().filter(|r| r.kind == Kind::Written).position(|r| r.name == row.name);
        self.list(
            |_| true,
            |row| {
                let schema = match written(row) {
                    Some(i) => format!("Tensor({}!)?", (b'c' + i as u8) as char),
                    None => spelling(row.kind).schema.into(),
                };
                format!("{schema} {}={}", row.name, default(row))
            },
        )
    }

    /// Returns the code for registrations of an op with these options.
    fn registration(&self) -> String {
        let all = |_: &Row| true;
        let List { args, args_size, fill, members, macros, .. } = self;
        format!(
            "
// Options of a call for Rust.
struct {args} {{
{c_fields}}};
static_assert(sizeof({args}) == {args_size}, \"Rust and C++ disagree about {args}\");

namespace volta_fa {{

// Options as C++ parameters, as arguments and in the schema. Int is int64_t in backends and c10::SymInt above them.
#define {macros}_PARAMETERS(Int) {parameters}
#define {macros}_ARGUMENTS {arguments}
#define {macros}_SCHEMA \"{schema}\"
// Schema of an overload that writes: alias sets from `c` on are options that it writes into.
#define {macros}_WRITING_SCHEMA \"{writing_schema}\"

template <class Int>
{args} {fill}({macros}_PARAMETERS(Int)) {{
    return {{{to_c}}};
}}

// Options by name, with the schema's defaults.
template <class Int>
struct {members} {{
{member_list}}};
#define {macros}_MEMBERS(options) {member_arguments}

}}  // namespace volta_fa
",
            c_fields = self.lines(all, |row| format!("{}{};", spelling(row.kind).c, row.name)),
            parameters = self.list(all, |row| format!("{}{}", spelling(row.kind).parameter, row.name)),
            arguments = self.list(all, |row| row.name.into()),
            schema = self.list(all, |row| format!("{} {}={}", spelling(row.kind).schema, row.name, default(row))),
            writing_schema = self.writing_schema(),
            to_c = self.list(all, |row| format!("{}({})", spelling(row.kind).to_c, row.name)),
            member_list = self.lines(all, |row| match row.default {
                "None" => format!("{}{};", spelling(row.kind).member, row.name),
                default => format!("{}{} = {default};", spelling(row.kind).member, row.name),
            }),
            member_arguments = self.list(all, |row| format!("options.{}", row.name)),
        )
    }

    /// Returns the code for the gradient of an op with these options.
    fn gradient(&self) -> String {
        let List { members, macros, .. } = self;
        format!(
            "
namespace volta_fa {{

// Options that may need a gradient.
#define VOLTA_FA_DIFFERENTIABLE_OPTIONS {differentiable}
#define VOLTA_FA_DIFFERENTIABLE_MEMBERS(options) {differentiable_members}

// Numbers of fwd's inputs, in the order of its schema.
struct FwdInput {{
    enum : size_t {{ q, k, v, {arguments}, generator, count }};
}};

// Numbers of the tensors that autograd saves; it saves other options by name.
struct SavedTensor {{
    enum : size_t {{ q, k, v, out, softmax_lse, rng_state, {tensor_names}, count }};
}};
#define VOLTA_FA_TENSOR_OPTIONS {tensor_names}

template <class Map, class Int = c10::SymInt>
void save_options(Map &saved, {macros}_PARAMETERS(Int)) {{
{save}}}

// Returns the saved options; `tensors` are in the order of SavedTensor.
template <class Map, class Tensors, class Int = c10::SymInt>
{members}<Int> saved_options(Map &saved, const Tensors &tensors) {{
    {members}<Int> options;
{restore}    return options;
}}

}}  // namespace volta_fa
",
            differentiable = self.list(|row| row.kind == Kind::Differentiable, |row| row.name.into()),
            differentiable_members = self.list(|row| row.kind == Kind::Differentiable, |row| format!("&options.{}", row.name)),
            arguments = self.list(|_| true, |row| row.name.into()),
            tensor_names = self.list(is_tensor, |row| row.name.into()),
            save = self.lines(|row| !is_tensor(row), |row| format!("saved[\"{0}\"] = {0};", row.name)),
            restore = self.lines(
                |_| true,
                |row| match is_tensor(row) {
                    true => format!("options.{0} = optional(tensors[SavedTensor::{0}]);", row.name),
                    false => format!("options.{0} = saved[\"{0}\"].{1};", row.name, spelling(row.kind).restore),
                }
            ),
        )
    }
}

fn default(row: &Row) -> &'static str {
    match row.default {
        "false" => "False",
        "true" => "True",
        other => other,
    }
}

pub fn write_header(path: &Path) -> Result<()> {
    let attention = List {
        rows: OPTIONS,
        args: "OptionArgs",
        args_size: size_of::<OptionArgs>(),
        fill: "option_args",
        members: "Options",
        macros: "VOLTA_FA_OPTION",
    };
    let fast = List {
        rows: FAST_OPTIONS,
        args: "FastOptionArgs",
        args_size: size_of::<FastOptionArgs>(),
        fill: "fast_option_args",
        members: "FastOptions",
        macros: "VOLTA_FA_FAST_OPTION",
    };
    let prepare = List {
        rows: PREPARE_OPTIONS,
        args: "PrepareOptionArgs",
        args_size: size_of::<PrepareOptionArgs>(),
        fill: "prepare_option_args",
        members: "PrepareOptions",
        macros: "VOLTA_FA_PREPARE_OPTION",
    };
    let kvcache = List {
        rows: KVCACHE_OPTIONS,
        args: "KvCacheOptionArgs",
        args_size: size_of::<KvCacheOptionArgs>(),
        fill: "kvcache_option_args",
        members: "KvCacheOptions",
        macros: "VOLTA_FA_KVCACHE_OPTION",
    };
    let mla = List {
        rows: MLA_OPTIONS,
        args: "MlaOptionArgs",
        args_size: size_of::<MlaOptionArgs>(),
        fill: "mla_option_args",
        members: "MlaOptions",
        macros: "VOLTA_FA_MLA_OPTION",
    };
    let header = [
        "// generated from src/options.rs by tools/build/options.rs: do not edit\n#pragma once\n\n#include \"arguments.h\"\n",
        &attention.registration(),
        &attention.gradient(),
        &fast.registration(),
        &prepare.registration(),
        &kvcache.registration(),
        &mla.registration(),
    ]
    .concat();
    if std::fs::read_to_string(path).ok().as_ref() != Some(&header) {
        std::fs::write(path, header)?;
    }
    Ok(())
}
