//! Folders for files of tests.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A folder of its own for a test, gone with it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("{}-{}-{name}", env!("CARGO_PKG_NAME"), std::process::id()));
        fs::create_dir_all(&path).expect("a folder for temporary files");
        Folder(path)
    }

    /// A path within, of a file that need not be there.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file within.
    #[allow(dead_code, reason = "not every test program writes files of its own")]
    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("within the folder")).expect("a folder within");
        fs::write(&path, bytes).expect("a file");
        path
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
