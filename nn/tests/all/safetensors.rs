//! The file format: what is written is read back, and no content of a file is trusted unchecked.

use crate::common::{T, cpu, scratch};
use numcore::{
    DType, ErrorKind, Tensor,
    ops::{PointwiseOps, ViewOps},
    safetensors::{HostTensor, Notes, load, metadata, read, read_host, save},
};

/// A file of this header and this much data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

fn refused(bytes: &[u8]) -> String {
    let error = read_host(bytes).expect_err("it must be refused");
    assert!(matches!(error.kind(), ErrorKind::Format { .. }), "{error}");
    error.to_string()
}

fn of_every_dtype() -> Vec<(String, T)> {
    let values = Tensor::from_slice(&cpu(), [5], &[0.0f64, 1.0, 2.0, 0.5, 100.0]).unwrap();
    DType::ALL.iter().map(|&d| (format!("tensor.{d}"), values.to_dtype(d).unwrap())).collect()
}

#[test]
fn every_dtype_comes_back() {
    let folder = scratch("dtypes");
    let path = folder.join("all.safetensors");
    let mut tensors = of_every_dtype();
    tensors.push(("empty".into(), Tensor::zeros(&cpu(), [3, 0], DType::F32).unwrap()));
    tensors.push(("scalar \"quoted\"\n".into(), Tensor::full(&cpu(), [], DType::I64, -7i64).unwrap()));
    let strided = Tensor::from_slice(&cpu(), [2, 3], &[1i32, 2, 3, 4, 5, 6]).unwrap().t().unwrap();
    tensors.push(("strided".into(), strided));
    save(&path, &tensors, &Notes::new()).unwrap();
    let mut back = load(&path, &cpu()).unwrap();
    assert_eq!(back.len(), tensors.len());
    let bytes = std::fs::read(&path).unwrap();
    let in_memory = read(&bytes, &cpu()).unwrap();
    assert!(back.iter().map(|(n, _)| n).eq(in_memory.iter().map(|(n, _)| n)), "both in the order of the file");
    for (name, want) in &tensors {
        let at = back.iter().position(|(n, _)| n == name).unwrap();
        let (_, got) = back.remove(at);
        assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{name}");
        assert_eq!(got.to_bytes().unwrap(), want.to_bytes().unwrap(), "{name}");
    }
}

/// A header of 123 + 256k bytes has a length that begins as JSON does.
#[test]
fn headers_of_every_length_are_read() {
    let entry = r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    for length in [120, 122, 123, 124, 379, 635] {
        let header = format!("{entry}{}}}", " ".repeat(length - entry.len() - 1));
        let bytes = file(&header, 1);
        let read: Vec<_> = read_host(&bytes).unwrap().into_iter().map(|t| t.name).collect();
        assert_eq!((header.len(), read), (length, vec!["x".to_string()]));
    }
}

#[test]
fn notes_travel_and_files_do_not_depend_on_order() {
    let folder = scratch("notes");
    let notes: Notes =
        [("format", "pt"), ("step", "100"), ("a \"b\"", "\u{1F600}\n")].map(|(k, v)| (k.into(), v.into())).into();
    let (a, b) = (folder.join("a"), folder.join("b"));
    save(&a, &of_every_dtype(), &notes).unwrap();
    let mut reversed = of_every_dtype();
    reversed.reverse();
    save(&b, &reversed, &notes).unwrap();
    assert_eq!(metadata(&a).unwrap(), notes);
    assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
    assert!(metadata(folder.join("absent")).is_err());
}

#[test]
fn data_is_aligned_when_written_and_may_be_unaligned_when_read() {
    let folder = scratch("aligned");
    let path = folder.join("m");
    save(&path, &of_every_dtype(), &Notes::new()).unwrap();
    let written = std::fs::read(&path).unwrap();
    for HostTensor { name, dtype, bytes, .. } in read_host(&written).unwrap() {
        let offset = bytes.as_ptr() as usize - written.as_ptr() as usize;
        assert_eq!(offset % dtype.size(), 0, "{name}");
    }
    let header =
        r#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}"#;
    let mut bytes = file(header, 9);
    let at = bytes.len() - 8;
    bytes[at..].copy_from_slice(&[1.5f32, -2.0].map(f32::to_le_bytes).concat());
    let tensors = read(&bytes, &cpu()).unwrap();
    assert_eq!(tensors[1].1.to_vec::<f32>().unwrap(), [1.5, -2.0]);
    let path = folder.join("unaligned");
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(load(&path, &cpu()).unwrap()[1].1.to_vec::<f32>().unwrap(), [1.5, -2.0]);
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let folder = scratch("cut");
    let path = folder.join("m");
    save(&path, &of_every_dtype(), &[("k".to_string(), "v".to_string())].into()).unwrap();
    let whole = std::fs::read(&path).unwrap();
    assert!(read_host(&whole).is_ok());
    for len in 0..whole.len() {
        refused(&whole[..len]);
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(refused(&longer).contains("are there"));
}

#[test]
fn a_byte_changed_anywhere_never_panics() {
    let folder = scratch("changed");
    let path = folder.join("m");
    save(&path, &of_every_dtype(), &[("k".to_string(), "v".to_string())].into()).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for i in 0..whole.len() {
        for value in [0, 0x22, 0x39, 0x7d, 0xff, whole[i] ^ 1] {
            let mut changed = whole.clone();
            changed[i] = value;
            let _ = read_host(&changed);
        }
    }
}

#[test]
fn hostile_headers_are_refused() {
    let one = |entry: &str| file(&format!("{{\"x\":{entry}}}"), 8);
    let with =
        |shape: &str, offsets: &str| one(&format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#));
    assert!(read_host(&with("[2]", "[0,8]")).is_ok());
    for (shape, offsets) in [
        ("[2]", "[-8,0]"),
        ("[2]", "[8,0]"),
        ("[2]", "[0,16]"),
        ("[2]", "[4,12]"),
        ("[3]", "[0,8]"),
        ("[-2]", "[0,8]"),
        ("[2.0]", "[0,8]"),
        ("[4611686018427387904,4]", "[0,8]"),
        ("[18446744073709551616]", "[0,8]"),
        ("[2]", "[0,18446744073709551615]"),
        ("2", "[0,8]"),
        ("[1,1,1,1,1,1,1,1,2]", "[0,8]"),
    ] {
        refused(&with(shape, offsets));
    }
    for header in ["", "{", "[]", "null", "{\"x\":1}", "{\"x\":{}}", "{\"__metadata__\":{\"a\":1}}", "{}"] {
        refused(&file(header, 8));
    }
    refused(&file(&"[".repeat(100_000), 8));
    for stated in [1u64 << 63, u64::MAX, 100_000_001, 9] {
        let mut bytes = stated.to_le_bytes().to_vec();
        bytes.extend([b' '; 8]);
        assert!(refused(&bytes).contains("states a header of"));
    }
}

/// Two tensors in one place, a hole between two, and lengths whose sum overflows.
#[test]
fn ranges_must_tile_the_data() {
    let two = |a: &str, b: &str, data| file(&format!(r#"{{"a":{{"dtype":"U8",{a}}},"b":{{"dtype":"U8",{b}}}}}"#), data);
    let range = |n: u64, from: u64, to: u64| format!(r#""shape":[{n}],"data_offsets":[{from},{to}]"#);
    assert!(read_host(&two(&range(4, 0, 4), &range(4, 4, 8), 8)).is_ok());
    refused(&two(&range(4, 0, 4), &range(4, 0, 4), 8));
    refused(&two(&range(4, 0, 4), &range(4, 2, 6), 6));
    refused(&two(&range(3, 0, 3), &range(4, 4, 8), 8));
    let big = u64::MAX / 8;
    let many: Vec<String> =
        (0..8).map(|i| format!(r#""t{i}":{{"dtype":"U8",{}}}"#, range(big, i * big, (i + 1) * big))).collect();
    refused(&file(&format!("{{{}}}", many.join(",")), 8));
}

#[test]
fn errors_name_the_file_and_the_tensor() {
    let folder = scratch("named");
    let path = folder.join("model.safetensors");
    let f8 = file(r#"{"w":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]}}"#, 8);
    std::fs::write(&path, &f8).unwrap();
    let message = load(&path, &cpu()).unwrap_err().to_string();
    assert!(
        message.contains("model.safetensors") && message.contains("`w`") && message.contains("F8_E8M0"),
        "{message}"
    );
    // Others in the file can be read.
    let both = r#"{"w":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]},"x":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}}"#;
    std::fs::write(&path, file(both, 9)).unwrap();
    let reader = numcore::safetensors::Reader::open(&path).unwrap();
    assert_eq!(reader.names().collect::<Vec<_>>(), ["w", "x"]);
    assert_eq!(reader.tensors().map(|(name, ..)| name).collect::<Vec<_>>(), ["x"]);
    assert_eq!(reader.bytes("x").unwrap().len(), 1);
    assert!(reader.tensor("w").unwrap_err().to_string().contains("F8_E8M0") && reader.bytes("w").is_err());
    let bools = file(r#"{"flag":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}"#, 3);
    assert!(refused(&bools).contains("`flag` is bool"));
    std::fs::write(&path, &bools).unwrap();
    assert!(load(&path, &cpu()).unwrap_err().to_string().contains("model.safetensors"));
    std::fs::write(&path, br#"{"weight_map": {}}"#).unwrap();
    assert!(load(&path, &cpu()).unwrap_err().to_string().contains("begins as JSON does"));
    std::fs::write(&path, b"PK\x03\x04 this is a zip of pickles").unwrap();
    assert!(load(&path, &cpu()).unwrap_err().to_string().contains("no safetensors file"));
}

#[test]
fn a_failed_save_leaves_the_last_good_file() {
    let folder = scratch("failed");
    let path = folder.join("m");
    save(&path, &of_every_dtype(), &Notes::new()).unwrap();
    let good = std::fs::read(&path).unwrap();
    let one = Tensor::ones(&cpu(), [1], DType::F32).unwrap();
    for names in [["a", "a"], ["a", "__metadata__"]] {
        let error = save(&path, &names.map(|n| (n.to_string(), one.clone())), &Notes::new()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::State { .. }), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), good);
    assert!(save(folder.join("no/such/folder"), &of_every_dtype(), &Notes::new()).is_err());
    // A folder in the file's place: the rename fails after everything was written.
    let taken = folder.join("taken");
    std::fs::create_dir(&taken).unwrap();
    std::fs::write(taken.join("inside"), b"kept").unwrap();
    assert!(save(&taken, &of_every_dtype(), &Notes::new()).is_err());
    let mut left: Vec<_> = std::fs::read_dir(&*folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["m", "taken"], "no temporary file is left behind");
}

#[test]
#[cfg(unix)]
fn a_symbolic_link_stays_one_and_its_target_is_replaced() {
    use std::os::unix::fs::symlink;
    let folder = scratch("links");
    let big = folder.join("big");
    std::fs::create_dir_all(&big).unwrap();
    // Relative to the link's own folder, absolute, a link to a link, and a link to a file that does not exist yet.
    let links = [("relative", "big/relative.safetensors".into()), ("absolute", big.join("absolute.safetensors"))];
    for (name, target) in &links {
        std::fs::write(folder.join(target), b"old").unwrap();
        symlink(target, folder.join(name)).unwrap();
    }
    symlink("relative", folder.join("chain")).unwrap();
    symlink("big/fresh.safetensors", folder.join("dangling")).unwrap();
    for name in ["relative", "absolute", "chain", "dangling"] {
        let link = folder.join(name);
        let to = std::fs::read_link(&link).unwrap();
        save(&link, &of_every_dtype(), &[("by".to_string(), name.to_string())].into()).unwrap();
        assert_eq!(std::fs::read_link(&link).unwrap(), to, "{name}");
        assert_eq!(metadata(&link).unwrap()["by"], name);
    }
    assert_eq!(metadata(big.join("relative.safetensors")).unwrap()["by"], "chain");
    assert!(big.join("fresh.safetensors").is_file());
    let left = std::fs::read_dir(&big).unwrap().count() + std::fs::read_dir(&*folder).unwrap().count();
    assert_eq!(left, 3 + 5, "no temporary file is left");
}

#[test]
#[cfg(unix)]
fn what_is_no_regular_file_is_never_replaced() {
    use std::os::unix::{fs::symlink, net::UnixListener};
    let folder = scratch("special");
    let _socket = UnixListener::bind(folder.join("socket")).unwrap();
    std::fs::create_dir_all(folder.join("folder")).unwrap();
    symlink("socket", folder.join("link to it")).unwrap();
    symlink("circle", folder.join("circle")).unwrap();
    let before = std::fs::read_dir(&*folder).unwrap().count();
    for (name, why) in [
        ("socket", "not a regular file"),
        ("folder", "not a regular file"),
        ("link to it", "socket: is not a regular file"),
        ("circle", "chain of more than 40"),
        // The file that was asked for, and the folder that is missing: nothing of temporary files.
        ("none/x.safetensors", "none/x.safetensors: there is no folder"),
    ] {
        let error = save(folder.join(name), &of_every_dtype(), &Notes::new()).unwrap_err().to_string();
        assert!(error.contains(why), "{name}: {error}");
    }
    assert_eq!(std::fs::read_dir(&*folder).unwrap().count(), before, "no temporary file is left");
}
