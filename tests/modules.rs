//! Tests that no files, and no top-level modules (files or folders of `src`), import each other in a circle, in the library and in the
//! simulator: each can then be read and changed without those that import it.
//!
//! The tests read source text. `imports_of_files` has the imports between single files: one through a `pub use` of a folder's `mod.rs`
//! counts for the file that defines the name. `of_modules` joins them to the imports between top-level modules.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

/// Modules or files by name, with what each imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Returns the Rust files of a folder and of its folders.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = paths.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|e| e == "rs")).collect()
}

/// The folders of the two crates.
const CRATES: [&str; 2] = ["src", "tools/volta-sim/src"];

/// Returns a file's text without comments, and without its module of tests, which stands last and may import anything.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end].lines().map(|line| line.split("//").next().unwrap_or("").to_string() + "\n").collect()
}

/// A file of a crate: its code and what it exports.
struct Source {
    code: String,
    /// Paths that it exports with `pub use`, by name. These do not count as imports.
    exports: BTreeMap<String, String>,
}

/// Files by path below `src`: `plan/decode.rs` is ["plan", "decode"], `plan/mod.rs` is ["plan"].
type Sources = BTreeMap<Vec<String>, Source>;

/// Reads all files of a crate but lib.rs, which imports every module.
fn sources(crate_folder: &str) -> Sources {
    let src = &Path::new(env!("CARGO_MANIFEST_DIR")).join(crate_folder);
    let read = |file: &PathBuf| {
        let name = file.strip_prefix(src).unwrap().with_extension("");
        let mut module: Vec<_> = name.iter().map(|word| word.to_str().unwrap().to_string()).collect();
        if module.last().is_some_and(|word| word == "mod") {
            module.pop();
        }
        (module, source(&std::fs::read_to_string(file).unwrap()))
    };
    rust_files(src).iter().filter(|file| !file.ends_with("lib.rs")).map(read).collect()
}

/// Separates a file's exports from its code.
fn source(text: &str) -> Source {
    let mut code = code(text);
    let mut exports = BTreeMap::new();
    for visible in ["pub use ", "pub(crate) use ", "pub(super) use "] {
        while let Some(at) = code.find(visible) {
            let end = at + code[at..].find(';').unwrap();
            for path in expanded(&code[at + visible.len()..end]) {
                exports.insert(path.rsplit("::").next().unwrap().to_string(), path);
            }
            code.replace_range(at..end, "");
        }
    }
    Source { code, exports }
}

/// Returns the paths of an import, without its braces: `a::{b, c::d}` gives `a::b` and `a::c::d`.
fn expanded(import: &str) -> Vec<String> {
    let Some((prefix, list)) = import.split_once('{') else { return vec![import.split(" as ").next().unwrap().trim().to_string()] };
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in list.trim_end().trim_end_matches('}').chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match c {
            ',' if depth == 0 => parts.push(String::new()),
            c => parts.last_mut().unwrap().push(c),
        }
    }
    let inner = parts.iter().filter(|part| !part.trim().is_empty()).flat_map(|part| expanded(part.trim()));
    inner.map(|path| prefix.trim().to_string() + &path).collect()
}

/// Returns the paths from `crate::`, `super::` or `self::` that a file's imports and its code name.
fn paths_in(code: &str) -> Vec<String> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let starts = ["crate::", "super::", "self::"].into_iter().flat_map(|start| code.match_indices(start));
    let first = starts.filter(|(at, _)| !code[..*at].ends_with(is_word));
    let path = |at: usize| {
        let end = at + code[at..].find(|c| !is_word(c)).unwrap_or(code.len() - at);
        match code[end..].starts_with('{') {
            true => expanded(code[at..end + code[end..].find(';').unwrap()].trim_end()),
            false => vec![code[at..end].to_string()],
        }
    };
    first.flat_map(|(at, _)| path(at)).collect()
}

/// Returns the file that defines what `path`, in the file `module`, names: the deepest file of the path, or the one that `pub use` names.
fn defining(files: &Sources, module: &[String], path: &str) -> Option<Vec<String>> {
    let has = |file: &[String], child: &str| files.contains_key(&[file, &[child.to_string()]].concat());
    let mut words = path.split("::").map(str::trim).peekable();
    let mut at = module.to_vec();
    match words.peek() {
        Some(&"crate") => at.clear(),
        Some(&"super" | &"self") => {}
        Some(child) if has(&at, child) => {}
        _ => return None, // of another crate
    }
    while words.next_if(|word| ["crate", "self"].contains(word)).is_some() {}
    while words.next_if_eq(&"super").is_some() {
        at.pop();
    }
    while let Some(child) = words.next_if(|word| has(&at, word)) {
        at.push(child.into());
    }
    let exported = words.peek().and_then(|word| files.get(&at)?.exports.get(*word));
    exported.and_then(|path| defining(files, &at, path)).or_else(|| files.contains_key(&at).then_some(at))
}

/// Returns the imports of each file. A `mod.rs` also imports the modules of its folder that its code names.
fn imports_of_files(files: &Sources) -> Imports {
    let of_file = |(module, source): (&Vec<String>, &Source)| {
        let children = files.keys().filter(|f| f.len() == module.len() + 1 && f.starts_with(module)).map(|f| &f[module.len()]);
        let uses = |child: &&String| {
            let calls = source.code.match_indices(&format!("{child}::")).map(|(at, _)| at).collect::<Vec<_>>();
            calls.into_iter().any(|at| !source.code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':'))
        };
        let own = children.filter(uses).map(|child| format!("self::{child}"));
        let found = paths_in(&source.code).into_iter().chain(own).filter_map(|path| defining(files, module, &path));
        (module.join("/"), found.filter(|other| other != module).map(|other| other.join("/")).collect())
    };
    files.iter().map(of_file).collect()
}

/// Returns the imports of each top-level module from those of its files.
fn of_modules(files: &Imports) -> Imports {
    let module = |file: &String| file.split('/').next().unwrap().to_string();
    let mut modules = Imports::new();
    for (file, others) in files {
        let others = others.iter().map(module).filter(|other| *other != module(file));
        modules.entry(module(file)).or_default().extend(others);
    }
    modules
}

/// Returns the shortest circle from each module, as "a -> b -> a".
fn circles(imports: &Imports) -> Vec<String> {
    let circle = |start: &String| {
        let (mut paths, mut seen) = (VecDeque::from([vec![start]]), BTreeSet::new());
        while let Some(path) = paths.pop_front() {
            for next in &imports[*path.last().unwrap()] {
                let path = [&path[..], &[next]].concat();
                if next == start {
                    return Some(path.into_iter().cloned().collect::<Vec<_>>().join(" -> "));
                }
                if seen.insert(next) {
                    paths.push_back(path);
                }
            }
        }
        None
    };
    imports.keys().filter_map(circle).collect()
}

#[test]
fn files_and_modules_import_each_other_without_circles() {
    for name in CRATES {
        let files = imports_of_files(&sources(name));
        let found = [circles(&files), circles(&of_modules(&files))].concat();
        assert!(found.is_empty(), "circles in {name}:\n{}", found.join("\n"));
    }
}

#[test]
fn reads_the_imports_of_both_crates() {
    let imports = CRATES.map(|name| imports_of_files(&sources(name)));
    let some = [("plan/decode", ["plan/choose", "plan/kernel", "problem/attention"]), ("ops/atomic", ["decoder", "ops/memory", "step"])];
    for (imports, (file, others)) in imports.iter().zip(some) {
        assert!(imports[file].is_superset(&others.map(String::from).into()), "{file}: {:?}", imports[file]);
    }
}

#[test]
fn finds_circles() {
    let files: Sources = [
        ("a", "mod one;\nmod two;\npub use one::{Thing, other::Name};"),
        ("a/one", "use super::two::{self, Word};\npub struct Thing;"),
        ("a/two", "use crate::a::Thing; // super::three"),
        ("b", "mod child;\nfn f() { child::g() }"),
        ("b/child", "use super::f;"),
        ("c", "use crate::d::f;"),
        ("e", "mod one;\nmod two;"),
        ("e/one", "use crate::f::g;"),
        ("e/two", ""),
        ("f", "use crate::e::two::{self};"),
        ("d", "pub fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::c::g;\n}"),
    ]
    .map(|(module, text)| (module.split('/').map(String::from).collect(), source(text)))
    .into();
    let imports = imports_of_files(&files);
    let found = circles(&imports);
    assert!(found.contains(&"a/one -> a/two -> a/one".into()) && found.contains(&"b -> b/child -> b".into()), "{found:?}");
    assert!(!found.iter().any(|circle| circle.starts_with("a ->")), "`pub use` of a folder's files is no import: {found:?}");
    assert!(!found.iter().any(|circle| circle.starts_with("c ->")), "tests may import anything: {found:?}");
    assert!(!found.iter().any(|circle| circle.starts_with(['e', 'f'])), "files of e form none: {found:?}");
    assert_eq!(circles(&of_modules(&imports)), ["e -> f -> e", "f -> e -> f"]);
}
