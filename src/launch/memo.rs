//! A process-wide table of values that are made once for each key. driver.rs keeps devices, their tuning files and loaded kernels in it,
//! simulator.rs tuning files and decoded kernels, and tuning.rs the tunings that it got as texts.

use crate::error::Result;
use std::sync::{Mutex, PoisonError, RwLock};

/// Values by key, kept as long as the process lives. A search compares the keys one by one. Each launch searches the loaded kernels, of
/// which there may be many, so driver.rs keys them by numbers.
pub struct Memo<Key, Value> {
    values: RwLock<Vec<(Key, Value)>>,
    /// Held while a value is made: making may take seconds (PTX), in which other threads still find values.
    making: Mutex<()>,
}

impl<Key: PartialEq, Value: Clone> Memo<Key, Value> {
    pub const fn new() -> Self {
        Memo { values: RwLock::new(Vec::new()), making: Mutex::new(()) }
    }

    /// Returns a key's value. The first call makes it; if that fails, the next call tries again.
    pub fn get_or_make(&self, key: Key, make: impl FnOnce() -> Result<Value>) -> Result<Value> {
        let find = || {
            let values = self.values.read().unwrap_or_else(PoisonError::into_inner);
            values.iter().find(|(known, _)| *known == key).map(|(_, value)| value.clone())
        };
        if let Some(value) = find() {
            return Ok(value);
        }
        let _one_at_a_time = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = find() {
            return Ok(value);
        }
        let value = make()?;
        self.values.write().unwrap_or_else(PoisonError::into_inner).push((key, value.clone()));
        Ok(value)
    }
}
