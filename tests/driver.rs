//! A machine without a CUDA driver: the library loads, and says what is missing when a GPU is asked for.

use volta_fa::error::ErrorKind;
use volta_fa::launch::driver::{self, Driver};
use volta_fa::launch::Launcher;

#[test]
fn reports_missing_driver() {
    if driver::is_available() {
        return;
    }
    let driver = Driver { device: 0, stream: std::ptr::null_mut() };
    for _ in 0..2 {
        // the second call must not find a half-made state
        let e = driver.limits().expect_err("there is no driver");
        assert_eq!(e.kind, ErrorKind::Runtime);
        assert!(e.message.contains("no CUDA driver") && e.message.contains("libcuda"), "{e}");
    }
}
