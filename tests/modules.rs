//! Tests that the modules of the library and of the simulator import each other without circles, and so do their files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

type Imports = BTreeMap<String, BTreeSet<String>>;

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => rust_files(&path, found),
            false if path.extension().is_some_and(|e| e == "rs") => found.push(path),
            false => {}
        }
    }
}

/// The folders of the two crates.
const CRATES: [&str; 2] = ["src", "tools/volta-sim/src"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns a file's text without comments, and without its module of tests, which stands last and may import anything.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end].lines().map(|line| line.split("//").next().unwrap_or("").to_string() + "\n").collect()
}

/// Returns the first words of `crate::` paths in a file: its imports at the level of its crate. Panics at a path in braces
/// (`use crate::{a, b}`), which it cannot read.
fn imported(text: &str) -> BTreeSet<String> {
    let code = code(text);
    let paths = code.match_indices("crate::").map(|(at, word)| &code[at + word.len()..]);
    let word = |path: &str| path.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or("").to_string();
    paths.map(word).inspect(|word| assert!(!word.is_empty(), "write `use crate::module::...`, one module a line")).collect()
}

/// Returns the imports of each module of a crate: a file, or a folder with all its files.
fn imports(src: &Path) -> Imports {
    let mut files = vec![];
    rust_files(src, &mut files);
    let mut imports = Imports::new();
    for file in files.iter().filter(|file| !file.ends_with("lib.rs")) {
        let first = file.strip_prefix(src).unwrap().components().next().unwrap();
        let module = first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_string();
        imports.entry(module).or_default().extend(imported(&std::fs::read_to_string(file).unwrap()));
    }
    let modules: BTreeSet<String> = imports.keys().cloned().collect();
    for (module, others) in &mut imports {
        others.retain(|other| other != module && modules.contains(other));
    }
    imports
}

/// A file of a crate: its code and what it exports.
struct Source {
    code: String,
    /// Paths that it exports with `pub use`, by name. These are a folder's face, no imports.
    exports: BTreeMap<String, String>,
}

type Sources = BTreeMap<Vec<String>, Source>;

fn sources(src: &Path) -> Sources {
    let mut files = vec![];
    rust_files(src, &mut files);
    let read = |file: &PathBuf| {
        let name = file.strip_prefix(src).unwrap().with_extension("");
        let mut module: Vec<_> = name.iter().map(|word| word.to_str().unwrap().to_string()).collect();
        if module.last().is_some_and(|word| word == "mod") {
            module.pop();
        }
        (module, source(&std::fs::read_to_string(file).unwrap()))
    };
    files.iter().filter(|file| !file.ends_with("lib.rs")).map(read).collect()
}

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

/// Returns the paths of an import, without its braces.
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

/// Returns the paths that a file names: of imports, and in its code.
fn named(code: &str) -> Vec<String> {
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

/// Returns the file that defines what `path` names in `module`.
fn defining(files: &Sources, module: &[String], path: &str) -> Option<Vec<String>> {
    let mut words = path.split("::").map(str::trim).peekable();
    let mut at = module.to_vec();
    match words.peek() {
        Some(&"crate") => at.clear(),
        Some(&"super") => {}
        Some(&"self") => {}
        Some(child) if files.contains_key(&[&at[..], &[child.to_string()]].concat()) => {}
        _ => return None,
    }
    while words.next_if(|word| ["crate", "self"].contains(word)).is_some() {}
    while words.next_if_eq(&"super").is_some() {
        at.pop();
    }
    while words.next_if(|word| files.contains_key(&[&at[..], &[word.to_string()]].concat())).map(|word| at.push(word.into())).is_some() {}
    let exported = words.peek().and_then(|word| files.get(&at)?.exports.get(*word));
    exported.and_then(|path| defining(files, &at, path)).or_else(|| files.contains_key(&at).then_some(at))
}

/// Returns the imports of each file. A `mod.rs` also imports the modules of its folder that its code names.
fn imports_of_files(files: &Sources) -> Imports {
    let of_file = |(module, source): (&Vec<String>, &Source)| {
        let children =
            files.keys().filter(|file| file.len() == module.len() + 1 && file.starts_with(module)).map(|file| &file[module.len()]);
        let uses = |child: &&String| {
            let calls = source.code.match_indices(&format!("{child}::")).map(|(at, _)| at).collect::<Vec<_>>();
            calls.into_iter().any(|at| !source.code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':'))
        };
        let own = children.filter(uses).map(|child| format!("self::{child}"));
        let found = named(&source.code).into_iter().chain(own).filter_map(|path| defining(files, module, &path));
        (module.join("/"), found.filter(|other| other != module).map(|other| other.join("/")).collect())
    };
    files.iter().map(of_file).collect()
}

/// Finds a circle that begins and ends at the first module of `path`.
fn circle(imports: &Imports, path: &mut Vec<String>, seen: &mut BTreeSet<String>) -> bool {
    for next in &imports[path.last().unwrap()] {
        if *next == path[0] {
            path.push(next.clone());
            return true;
        }
        if seen.insert(next.clone()) {
            path.push(next.clone());
            if circle(imports, path, seen) {
                return true;
            }
            path.pop();
        }
    }
    false
}

fn circles(imports: &Imports) -> Vec<String> {
    let found = imports.keys().filter_map(|module| {
        let mut path = vec![module.clone()];
        circle(imports, &mut path, &mut BTreeSet::new()).then(|| path.join(" -> "))
    });
    found.collect()
}

#[test]
fn modules_import_each_other_without_circles() {
    for name in CRATES {
        let found = circles(&imports(&folder(name)));
        assert!(found.is_empty(), "circles among modules of {name}:\n{}", found.join("\n"));
    }
}

#[test]
fn files_import_each_other_without_circles() {
    for name in CRATES {
        let found = circles(&imports_of_files(&sources(&folder(name))));
        assert!(found.is_empty(), "circles among files of {name}:\n{}", found.join("\n"));
    }
}

#[test]
fn reads_the_imports_of_both_crates() {
    let imports = CRATES.map(|name| imports_of_files(&sources(&folder(name))));
    let expected =
        [("plan/decode", ["plan/choose", "plan/kernel", "problem/attention"]), ("ops/atomic", ["decoder", "ops/memory", "step"])];
    for (imports, (file, others)) in imports.iter().zip(expected) {
        assert!(imports[file].is_superset(&others.map(String::from).into()), "{file}: {:?}", imports[file]);
    }
}

#[test]
fn finds_a_circle_of_files() {
    let files: Sources = [
        ("a", "mod one;\nmod two;\npub use one::{Thing, other::Name};"),
        ("a/one", "use super::two::{self, Word};\npub struct Thing;"),
        ("a/two", "use crate::a::Thing; // super::three"),
        ("b", "mod child;\nfn f() { child::g() }"),
        ("b/child", "use super::f;"),
        ("c", "use crate::d::f;"),
        ("d", "pub fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::c::g;\n}"),
    ]
    .map(|(module, text)| (module.split('/').map(String::from).collect(), source(text)))
    .into();
    let found = circles(&imports_of_files(&files));
    assert!(found.contains(&"a/one -> a/two -> a/one".into()) && found.contains(&"b -> b/child -> b".into()), "{found:?}");
    assert!(!found.iter().any(|circle| circle.starts_with("a ->")), "a folder's face imports nothing: {found:?}");
    assert!(!found.iter().any(|circle| circle.starts_with("c ->")), "tests may import anything: {found:?}");
}

#[test]
fn finds_an_import_circle() {
    let graph = |edges: &[(&str, &[&str])]| -> Imports {
        edges.iter().map(|(from, to)| (from.to_string(), to.iter().map(|s| s.to_string()).collect())).collect()
    };
    assert_eq!(circles(&graph(&[("a", &["b"]), ("b", &["c"]), ("c", &["a"])]))[0], "a -> b -> c -> a");
    assert!(circles(&graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])).is_empty());
    assert_eq!(imported("use crate::plan::{self}; // crate::ffi\nlet x = crate::info::y;"), BTreeSet::from(["info".into(), "plan".into()]));
}
