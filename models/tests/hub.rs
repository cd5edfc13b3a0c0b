//! The Hub's client against a server in this process that answers as the Hub does, and against a cache.
#![cfg(feature = "hub")]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use models::{Decoder, Hub, HubOptions, Pretrained};
use nn::{Init, ModuleExt};
use runtime_cpu::Cpu;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The SHA-256 of `hello`.
const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

/// A way in which a server answers otherwise.
#[derive(Clone, PartialEq)]
enum Trick {
    None,
    /// Files have this ETag.
    Etag(&'static str),
    /// Files are of this commit.
    Commit(&'static str),
    /// The first two answers with bytes of a file end after half of them.
    Cut,
    /// Parts of files are not given: all are sent whole.
    Whole,
    /// Files lie at another address, which must not see the token.
    Away(String),
    /// The files of that other address.
    There,
}

/// A server of one repository, `team/llama`, whose branch `main` is a folder.
struct Server {
    address: String,
    /// The methods and paths that were asked for.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(folder: PathBuf) -> Self {
        Self::with(folder, Trick::None)
    }

    fn with(folder: PathBuf, trick: Trick) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, asked) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let noted = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (folder, noted, trick) = (folder.clone(), noted.clone(), trick.clone());
                let answered = move || while answer(stream.as_ref().unwrap(), &folder, &noted, &trick).is_some() {};
                std::thread::spawn(answered);
            }
        });
        Server { address: format!("http://{address}"), asked }
    }

    fn hub(&self, cache: &Path) -> Hub {
        Hub::new(HubOptions {
            endpoint: self.address.clone(),
            cache: cache.into(),
            token: Some("secret".into()),
            offline: false,
            progress: false,
        })
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }
}

/// Answers one request; none if the connection is closed.
fn answer(mut stream: &TcpStream, folder: &Path, noted: &Mutex<Vec<String>>, trick: &Trick) -> Option<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let (method, path) = first.split_once(' ')?;
    let path = path.split(' ').next()?.to_owned();
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let header = |name: &str| headers.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
    let range = header("range: bytes=");
    let asked = format!("{method} {path}{}", range.as_ref().map_or(String::new(), |range| format!(" {range}")));
    noted.lock().unwrap().push(asked);
    let listing = "/api/models/team/llama/revision/main";
    let resolved = format!("/team/llama/resolve/{COMMIT}/");
    let token = if *trick == Trick::There { None } else { Some("bearer secret") };
    let mut sent = usize::MAX;
    let (status, extra, body) = if header("authorization: ").as_deref() != token {
        ("401 Unauthorized", String::new(), Vec::new())
    } else if path == listing {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names: Vec<String> = names.map(|name| format!("{{\"rfilename\": \"{name}\"}}")).collect();
        let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", names.join(", "));
        ("200 OK", "Content-Type: application/json\r\n".into(), body.into_bytes())
    } else if let Some(name) = path.strip_prefix(&resolved) {
        let bytes = fs::read(folder.join(name)).unwrap();
        let own = format!("etag-{}", name.replace('.', "-"));
        let etag = if let Trick::Etag(etag) = trick { etag } else { own.as_str() };
        let commit = if let Trick::Commit(commit) = trick { commit } else { COMMIT };
        let mut extra = format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\n");
        let range = range.filter(|_| *trick != Trick::Whole);
        let from = range.and_then(|range| range.strip_suffix('-')?.parse::<usize>().ok()).unwrap_or(0);
        if method == "GET" && *trick == Trick::Cut && noted.lock().unwrap().len() < 5 {
            sent = (bytes.len() - from) / 2;
        }
        if let Trick::Away(to) = trick {
            extra += &format!("X-Linked-Size: {}\r\nLocation: {to}{path}\r\n", bytes.len());
            ("302 Found", extra, Vec::new())
        } else if from > 0 {
            extra += &format!("Content-Range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
            ("206 Partial Content", extra, bytes[from..].to_vec())
        } else {
            ("200 OK", extra, bytes)
        }
    } else {
        ("404 Not Found", String::new(), Vec::new())
    };
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{extra}\r\n", body.len()).ok()?;
    if method == "HEAD" {
        return Some(());
    }
    stream.write_all(&body[..sent.min(body.len())]).ok()?;
    // A cut answer ends the connection.
    (sent >= body.len()).then_some(())
}

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("references").join(name)
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("weftgrad-hub-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        Scratch(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_folder_is_downloaded_once_and_then_read_offline() {
    let (server, cache) = (Server::new(reference("llama")), Scratch::new("folder"));
    let hub = server.hub(&cache.0);
    let folder = hub.folder("team/llama", "main").unwrap();
    assert!(folder.ends_with(format!("models--team--llama/snapshots/{COMMIT}")));
    let read = |path: &Path| {
        let model = Decoder::from_pretrained(path, &Init::new(&Cpu::with_threads(1), 0)).unwrap();
        model.state_dict().unwrap().iter().map(|(_, x)| x.to_bytes().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(read(&folder), read(&reference("llama")));
    assert!(!folder.join("reference.safetensors").exists(), "no file but those of a model");
    // The second time the list of files alone is asked for, to see whether the branch has moved.
    server.asked();
    assert_eq!(hub.folder("team/llama", "main").unwrap(), folder);
    assert_eq!(server.asked(), ["GET /api/models/team/llama/revision/main"]);
    let offline = Hub::new(HubOptions {
        endpoint: "http://127.0.0.1:9".into(),
        cache: cache.0.clone(),
        token: None,
        offline: true,
        progress: false,
    });
    for revision in ["main", COMMIT] {
        assert_eq!(offline.folder("team/llama", revision).unwrap(), folder);
        assert_eq!(offline.file("team/llama", revision, "config.json").unwrap(), folder.join("config.json"));
    }
    for (repository, revision, due) in [
        ("team/llama", "next", "team/llama at next`: is not in the cache"),
        ("team/gpt2", "main", "HF_HUB_OFFLINE"),
        ("../../llama", "main", "is no repository"),
        ("team/llama", "../../../snapshots", "is no revision"),
    ] {
        let error = offline.folder(repository, revision).unwrap_err().to_string();
        assert!(error.contains(due), "{error}");
    }
    let error = offline.file("team/llama", "main", "model.gguf").unwrap_err().to_string();
    assert!(error.contains("without `model.gguf`"), "{error}");
}

#[test]
fn one_file_is_had_by_its_name() {
    let (server, cache) = (Server::new(reference("gguf")), Scratch::new("file"));
    let path = server.hub(&cache.0).file("team/llama", "main", "llama-f16.gguf").unwrap();
    assert_eq!(fs::read(&path).unwrap(), fs::read(reference("gguf/llama-f16.gguf")).unwrap());
    let file = format!("/team/llama/resolve/{COMMIT}/llama-f16.gguf");
    let due = ["GET /api/models/team/llama/revision/main".into(), format!("HEAD {file}"), format!("GET {file}")];
    assert_eq!(server.asked(), due);
    let offline = HubOptions { cache: cache.0.clone(), offline: true, ..Default::default() };
    let error = Hub::new(offline).folder("team/llama", "main").unwrap_err().to_string();
    assert!(error.contains("without the files of a model"), "{error}");
    let error = server.hub(&cache.0).file("team/llama", "main", "other.gguf").unwrap_err().to_string();
    assert!(error.contains("team/llama at main") && error.contains("has no file `other.gguf`"), "{error}");
    let error = server.hub(&cache.0).file("team/llama", "main", "../a").unwrap_err().to_string();
    assert!(error.contains("outside of it"), "{error}");
}

#[test]
fn what_the_server_refuses_is_an_error_with_advice() {
    let (server, cache) = (Server::new(reference("llama")), Scratch::new("refused"));
    let error = server.hub(&cache.0).folder("team/other", "main").unwrap_err().to_string();
    assert!(error.contains("team/other at main") && error.contains("404") && error.contains("HF_TOKEN"), "{error}");
    let without = Hub::new(HubOptions {
        endpoint: server.address.clone(),
        cache: cache.0.clone(),
        token: None,
        offline: false,
        progress: false,
    });
    let error = without.folder("team/llama", "main").unwrap_err().to_string();
    assert!(error.contains("401"), "{error}");
}

/// A repository with the one file `a.json`, which is `hello`; its cache beside it, and the path of its contents there.
fn hello(name: &str) -> (Scratch, PathBuf, PathBuf, PathBuf) {
    let scratch = Scratch::new(name);
    let (files, cache) = (scratch.0.join("files"), scratch.0.join("cache"));
    fs::create_dir_all(&files).unwrap();
    fs::write(files.join("a.json"), "hello").unwrap();
    let blobs = cache.join("models--team--llama/blobs");
    fs::create_dir_all(&blobs).unwrap();
    (scratch, files, cache, blobs)
}

#[test]
fn names_that_the_server_gives_are_no_paths() {
    let (scratch, files, cache, _) = hello("names");
    let far = "ffff456789abcdef0123456789abcdef01234567";
    for (trick, due) in [
        (Trick::Etag("../../../../evil"), "`../../../../evil` is no name of a file"),
        (Trick::Etag(""), "is no name of a file"),
        (Trick::Commit("../../../evil"), "is of the commit `../../../evil`"),
        (Trick::Commit(far), "was asked for"),
    ] {
        let error = Server::with(files.clone(), trick).hub(&cache).folder("team/llama", "main").unwrap_err();
        assert!(error.to_string().contains(due) && error.to_string().contains("`a.json`"), "{error}");
    }
    let count = |folder: &Path| fs::read_dir(folder).unwrap().count();
    assert_eq!((count(&scratch.0), count(&cache), count(&cache.join("models--team--llama"))), (2, 1, 1));
}

#[test]
fn contents_that_are_in_the_cache_are_linked() {
    let (_scratch, files, cache, blobs) = hello("linked");
    fs::write(blobs.join("etag-a-json"), "HELLO").unwrap();
    let server = Server::new(files);
    let folder = server.hub(&cache).folder("team/llama", "main").unwrap();
    assert_eq!(fs::read(folder.join("a.json")).unwrap(), b"HELLO");
    assert!(server.asked().iter().all(|asked| !asked.starts_with("GET /team")));
}

#[test]
fn downloads_that_are_cut_off_go_on() {
    let (_scratch, files, cache, blobs) = hello("cut");
    let server = Server::with(files, Trick::Cut);
    let folder = server.hub(&cache).folder("team/llama", "main").unwrap();
    assert_eq!(fs::read(folder.join("a.json")).unwrap(), b"hello");
    let file = format!("GET /team/llama/resolve/{COMMIT}/a.json");
    assert_eq!(server.asked()[2..], [file.clone(), format!("{file} 2-"), format!("{file} 3-")]);
    assert_eq!(fs::read_dir(blobs).unwrap().count(), 1);
}

#[test]
fn parts_of_earlier_downloads_are_checked() {
    // Bytes that begin otherwise, as many bytes that are wrong, and more bytes; the last part is right.
    for (trick, part, requests) in [
        (Trick::Whole, "xx", 1),
        (Trick::Etag(HELLO), "xx", 2),
        (Trick::Etag(HELLO), "world", 1),
        (Trick::Etag(HELLO), "hello, world", 1),
        (Trick::Etag(HELLO), "hello", 0),
    ] {
        let (_scratch, files, cache, blobs) = hello("parts");
        let etag = if trick == Trick::Whole { "etag-a-json" } else { HELLO };
        fs::write(blobs.join(format!("{etag}.part")), part).unwrap();
        let server = Server::with(files, trick);
        let folder = server.hub(&cache).folder("team/llama", "main").unwrap();
        assert_eq!(fs::read(folder.join("a.json")).unwrap(), b"hello", "{part}");
        assert_eq!(server.asked().iter().filter(|asked| asked.starts_with("GET /team")).count(), requests, "{part}");
    }
}

#[test]
fn the_token_is_for_its_own_host_alone() {
    let (_scratch, files, cache, _) = hello("away");
    let there = Server::with(files.clone(), Trick::There);
    let server = Server::with(files, Trick::Away(there.address.clone()));
    let hub = server.hub(&cache);
    let folder = hub.folder("team/llama", "main").unwrap();
    assert_eq!(fs::read(folder.join("a.json")).unwrap(), b"hello");
    assert_eq!(there.asked(), [format!("GET /team/llama/resolve/{COMMIT}/a.json")]);
    assert!(!format!("{hub:?}").contains("secret"));
}
