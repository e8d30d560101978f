//! Writes the files that are made from the exporter's lists.

use std::{error::Error, fs, path::Path};

use gantry_exporter::documents::{Document, all};

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for Document { path, text } in all() {
        let path = root.join(path);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, text)?;
    }
    Ok(())
}
