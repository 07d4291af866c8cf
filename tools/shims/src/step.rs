//! Runs a compiler or linker if its output is missing or stale, as make does.

use anyhow::{bail, Context, Result};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// A command that makes one file. A change of its program or arguments makes the file stale. Its environment and directory are ignored.
pub struct Step {
    pub command: Command,
    pub output: PathBuf,
    /// files that the output depends on, besides those in the compiler's dependency file (`-MD`)
    pub inputs: Vec<PathBuf>,
}

impl Step {
    /// Runs the command unless the output is up to date.
    pub fn bring_up_to_date(&self) -> Result<()> {
        if self.is_up_to_date() {
            return Ok(());
        }
        let stamp = self.output.with_extension("command");
        if let Some(folder) = self.output.parent() {
            std::fs::create_dir_all(folder)?;
        }
        // an interrupted or failed command leaves no stamp
        let _ = std::fs::remove_file(&stamp);
        let words = self.words();
        let result = Command::new(words[0]).args(&words[1..]).output().with_context(|| format!("cannot run {:?}", words[0]))?;
        eprint!("{}", String::from_utf8_lossy(&result.stderr));
        if !result.status.success() {
            eprint!("{}", String::from_utf8_lossy(&result.stdout));
            bail!("cannot make {}", self.output.display());
        }
        Ok(std::fs::write(stamp, format!("{words:?}"))?)
    }

    /// Returns true if the output exists, is no older than all inputs and was made by the same command.
    pub fn is_up_to_date(&self) -> bool {
        let made_by = std::fs::read_to_string(self.output.with_extension("command"));
        made_by.is_ok_and(|line| line == format!("{:?}", self.words())) && self.is_fresh()
    }

    fn words(&self) -> Vec<&OsStr> {
        std::iter::once(self.command.get_program()).chain(self.command.get_args()).collect()
    }

    fn is_fresh(&self) -> bool {
        let Some(made) = modified(&self.output) else { return false };
        let headers = std::fs::read_to_string(self.output.with_extension("d")).map(|rule| prerequisites(&rule)).unwrap_or_default();
        self.inputs.iter().chain(&headers).all(|input| modified(input).is_some_and(|changed| changed <= made))
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|data| data.modified()).ok()
}

/// Returns the files after the colon of a make rule, as compilers write it: `\` continues a line and escapes blanks.
fn prerequisites(rule: &str) -> Vec<PathBuf> {
    let (_, files) = rule.split_once(": ").unwrap_or_default();
    let escaped = files.replace("\\\n", " ").replace("\\ ", "\0");
    escaped.split_whitespace().map(|file| file.replace('\0', " ").into()).collect()
}

/// Writes a file unless it has this content, so that its time stays.
pub fn write_if_changed(path: &Path, content: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_dependency_file() {
        let files = prerequisites("out/a.o: torch_ops/a.cpp \\\n /some\\ where/b.h \\\n c.h\n");
        assert_eq!(files, ["torch_ops/a.cpp", "/some where/b.h", "c.h"].map(PathBuf::from));
    }

    #[test]
    fn runs_again_only_after_a_change_of_an_input_or_of_the_command() {
        let folder = std::env::temp_dir().join(format!("volta-fa-step-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (input, header, output, runs) = (folder.join("in"), folder.join("header"), folder.join("out.o"), folder.join("runs"));
        let older = SystemTime::now() - std::time::Duration::from_secs(60);
        for path in [&input, &header] {
            std::fs::File::create(path).unwrap().set_modified(older).unwrap();
        }
        std::fs::write(folder.join("out.d"), format!("out.o: {}\n", header.display())).unwrap();
        let make = |text: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo $1 >> $2; : > $3", "sh", text]).args([&runs, &output]);
            Step { command, output: output.clone(), inputs: vec![input.clone()] }.bring_up_to_date().unwrap();
            std::fs::read_to_string(&runs).unwrap().lines().count()
        };
        assert_eq!([make("a"), make("a"), make("b"), make("b")], [1, 1, 2, 2]);
        for (changed, expected) in [(&input, 3), (&header, 4)] {
            let later = SystemTime::now() + std::time::Duration::from_secs(60);
            std::fs::File::open(changed).unwrap().set_modified(later).unwrap();
            assert_eq!(make("b"), expected);
            std::fs::File::open(changed).unwrap().set_modified(older).unwrap();
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
