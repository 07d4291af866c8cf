//! Tests that the modules of `src/` import each other without circles.

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

/// Returns the first words of `crate::` paths in a file, without comments: its imports at the level of `src/`. Panics at a path in braces
/// (`use crate::{a, b}`), which it cannot read.
fn imported(text: &str) -> BTreeSet<String> {
    let code: Vec<_> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let code = code.join("\n");
    let paths = code.match_indices("crate::").map(|(at, word)| &code[at + word.len()..]);
    let word = |path: &str| path.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or("").to_string();
    paths.map(word).inspect(|word| assert!(!word.is_empty(), "write `use crate::module::...`, one module a line")).collect()
}

/// Returns the imports of each module of `src/`: a file, or a folder with all its files.
fn imports() -> Imports {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = vec![];
    rust_files(&src, &mut files);
    let mut imports = Imports::new();
    for file in files.iter().filter(|file| !file.ends_with("lib.rs")) {
        let first = file.strip_prefix(&src).unwrap().components().next().unwrap();
        let module = first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_string();
        imports.entry(module).or_default().extend(imported(&std::fs::read_to_string(file).unwrap()));
    }
    let modules: BTreeSet<String> = imports.keys().cloned().collect();
    for (module, others) in &mut imports {
        others.retain(|other| other != module && modules.contains(other));
    }
    imports
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
    let found = circles(&imports());
    assert!(found.is_empty(), "circles among modules of src/:\n{}", found.join("\n"));
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
