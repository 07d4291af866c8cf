//! Sources of tunings: a file of the user for each card (a GPU with its driver), or a text from [`force`]. A tuning says which kernels
//! plans take or avoid on a card; `crate::tuning` parses it, and launchers put it into the `DeviceLimits` of a plan. Launchers read a
//! device's file once, for its first plan. A bad file costs one warning; the plan then has no tuning. Tests: tests/test_tuning.py.

use super::memo::Memo;
use crate::error::{Error, Result};
use crate::kernels::COMPILED;
use crate::plan::DeviceLimits;
use crate::tuning::{Card, Tuning};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Environment variable: 0 reads no tuning file, a path reads this one.
pub const VARIABLE: &str = "VOLTA_FA_TUNING";
/// Largest tuning file, bytes: 512 choices (`MAX_CHOICES`) have 2 KiB each, for every field and a note of some hundred characters.
const MAX_BYTES: u64 = 1 << 20;

/// Outcome of reading a device's tuning file.
pub enum Outcome {
    /// Not read: the environment disables files.
    Off,
    /// The file does not exist.
    Missing,
    /// Read, and used by plans.
    Read(&'static Tuning),
    /// Not used, for this reason.
    Ignored(String),
}

/// A device's tuning file, as found.
pub struct DeviceTuning {
    /// GPU and software on which the file must be made.
    pub card: Card,
    /// Path of the file, which need not exist; None: the environment has no home folder.
    pub path: Option<PathBuf>,
    pub outcome: Outcome,
}

impl DeviceTuning {
    /// Returns the file's tuning, None unless it was read. Plans use it unless [`force`] set one.
    pub fn tuning(&self) -> Option<&'static Tuning> {
        match self.outcome {
            Outcome::Read(tuning) => Some(tuning),
            _ => None,
        }
    }
}

/// The tuning that [`force`] set; null: none.
static FORCED: AtomicPtr<Tuning> = AtomicPtr::new(std::ptr::null_mut());
/// Tunings by each text that [`force`] got.
static PARSED: Memo<String, &'static Tuning> = Memo::new();

/// Reads a card's file. The result lives as long as the process.
pub fn look_up(card: Card, limits: &DeviceLimits) -> &'static DeviceTuning {
    let variable = std::env::var_os(VARIABLE).filter(|v| !v.is_empty());
    let off = variable.as_ref().is_some_and(|v| v == "0");
    let given = variable.filter(|_| !off).map(PathBuf::from);
    let path = given.clone().or_else(|| Some(user_folder()?.join(card.file_name())));
    let outcome = match &path {
        _ if off => Outcome::Off,
        None => Outcome::Missing,
        Some(path) => match read(path, &card) {
            Ok(None) if given.is_none() => Outcome::Missing,
            Ok(None) => ignored(path, "there is no such file"),
            Ok(Some(tuning)) => {
                // the choices that this GPU can run, and a line for each other
                let (tuning, rejected) = tuning.usable_on(*COMPILED, limits.sm(), limits.shared_bytes_per_block);
                if !rejected.is_empty() {
                    warn(&format!("choices of the tuning {} are ignored: {}", path.display(), rejected.join("; ")));
                }
                Outcome::Read(Box::leak(Box::new(tuning)))
            }
            Err(e) => ignored(path, &e.message),
        },
    };
    Box::leak(Box::new(DeviceTuning { card, path, outcome }))
}

fn warn(text: &str) {
    eprintln!("volta_fa: {text}");
}

/// Returns the outcome for a file that is not used, after a warning.
fn ignored(path: &Path, why: &str) -> Outcome {
    warn(&format!(
        "the tuning {} is ignored: {why} (`python -m volta_fa check --tune` makes a new one; {VARIABLE}=0 reads none)",
        path.display()
    ));
    Outcome::Ignored(why.into())
}

/// Returns the tuning of a file; None if there is no such file.
fn read(path: &Path, card: &Card) -> Result<Option<Tuning>> {
    let unreadable = |e: std::io::Error| Error::runtime(e.to_string());
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        // a pipe would block the open
        Ok(found) if !found.is_file() => return Err(Error::value("tuning", "a folder, pipe or device", "a file")),
        found => found.map_err(unreadable)?,
    };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::value("tuning", format!("more than {MAX_BYTES} bytes"), "less"));
    }
    let tuning = Tuning::parse(&text, *COMPILED)?;
    tuning.check_made_on(card)?;
    Ok(Some(tuning))
}

/// Returns the folder of a user's tuning files, by the XDG base directory specification, which ignores relative paths in its variable.
fn user_folder() -> Option<PathBuf> {
    let absolute = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
    Some(data.join("volta_fa").join("tuning"))
}

/// Sets a tuning for plans on all devices in place of the files. An empty text restores the files.
///
/// Plans hold references to tunings, so each text is kept once for the life of the process. Tests and `python -m volta_fa check` call this
/// by `_set_tuning()`. The text need not name a card. It may choose batch-invariant kernels, as a file may not: `check` runs each of them.
pub fn force(text: &str) -> Result<()> {
    let tuning = match text {
        "" => std::ptr::null(),
        _ => PARSED.get_or_make(text.into(), || Ok(Box::leak(Box::new(Tuning::parse(text, *COMPILED)?))))?,
    };
    FORCED.store(tuning.cast_mut(), Ordering::Release);
    Ok(())
}

/// Returns the tuning that [`force`] set last.
pub fn forced() -> Option<&'static Tuning> {
    // SAFETY: null, or a tuning that lives as long as the process and is never written.
    unsafe { FORCED.load(Ordering::Acquire).as_ref() }
}
