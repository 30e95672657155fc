//! HTTP through the real program: curl on one side, nginx on the other. Needs
//! root and eBPF, and fails without; Debian packages: curl, nginx-light.

use crate::running::{LONGSPLICE, Pins, Running};
use longsplice_lab::{
    ChildGuard, Family, Lab, Shape, pattern,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};
use tempfile::TempDir;

const PROXY: u16 = 3128;
const PORT: u16 = 8080;
const SITE: u16 = 8000;
/// Time limit for every curl command.
const PATIENCE: Duration = Duration::from_secs(40);
const SIZE: usize = 30_000_000;

/// curl's network, the program, and nginx with the files in `root`: /slow at 20 MB/s, /zip in chunks.
struct Scene {
    proxy: Running,
    pins: Pins,
    _nginx: ChildGuard,
    lab: Lab,
    dir: TempDir,
}

impl Scene {
    fn new(more: &[&str]) -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for folder in ["root", "root/slow", "root/zip", "root/put"] {
            fs::create_dir(dir.path().join(folder)).unwrap();
        }
        let nginx = nginx(&lab, dir.path());
        let mut arguments = vec!["--splice".to_owned(), "65536".into(), "--log-format".into(), "json".into()];
        for family in Family::BOTH {
            arguments.extend(["--http".into(), FORWARDER_TO_CLIENT.port(family, PROXY).to_string()]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, more);
        Scene { proxy, pins: Pins::of(&lab.forwarder), _nginx: nginx, lab, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Creates a file whose blocks are all different.
    fn file(&self, name: &str, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        pattern::fill(len as u64, 0, &mut bytes);
        fs::write(self.path(name), &bytes).unwrap();
        bytes
    }

    fn same(&self, name: &str, bytes: &[u8]) {
        let found = fs::read(self.path(name)).unwrap();
        assert_eq!(found.len(), bytes.len(), "{name}");
        assert_eq!(Sha256::digest(&found), Sha256::digest(bytes), "{name}");
    }

    /// Runs curl with the proxy of this address family. Returns its output.
    fn curl(&self, family: Family, arguments: &[&str]) -> String {
        let mut command = self.lab.client.command("curl");
        command.args(["--disable", "--silent", "--show-error", "--noproxy", "", "--max-time", "35", "--proxy"]);
        command.arg(format!("http://{}", FORWARDER_TO_CLIENT.port(family, PROXY))).args(arguments);
        let mut curl = ChildGuard::spawn(command.current_dir(self.dir.path())).unwrap();
        let status = curl.wait(PATIENCE);
        assert!(status.is_some_and(|s| s.success()), "{arguments:?}: {status:?}: {}", curl.output());
        curl.output()
    }
}

fn nginx(lab: &Lab, dir: &Path) -> ChildGuard {
    let config = dir.join("nginx.conf");
    let at = dir.display();
    let text = format!(
        "daemon off; master_process off; user root; pid {at}/nginx.pid; error_log stderr; events {{}}\n\
         http {{ access_log off; client_body_temp_path {at}/body; proxy_temp_path {at}/proxy;\n\
         fastcgi_temp_path {at}/fastcgi; uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;\n\
         server {{ listen {PORT}; listen [::]:{PORT}; client_max_body_size 0; root {at}/root;\n\
         location /slow {{ limit_rate 20m; }} location /put {{ dav_methods PUT; }}\n\
         location /zip {{ gzip on; gzip_types *; gzip_min_length 0; gzip_proxied any; gzip_http_version 1.0; }}\n\
         location /where {{ return 200 \"$server_addr $http_host $http_x_forwarded_for\\n\"; }}
         location /echo {{ return 200 \"$request_method $request_uri $http_host $http_via\\n\"; }} }} }}\n"
    );
    fs::write(&config, text).unwrap();
    let mut command = lab.server.command("nginx");
    let nginx = ChildGuard::spawn(command.arg("-e").arg("stderr").arg("-p").arg(dir).arg("-c").arg(&config)).unwrap();
    lab.server.wait_listening(PORT, Duration::from_secs(10)).unwrap();
    nginx
}

/// Sends one request on a connection of its own. Returns the status line.
fn ask(scene: &Scene, path: &str) -> String {
    let proxy = FORWARDER_TO_CLIENT.port(Family::V4, PROXY);
    let mut connection = scene.lab.client.run(|| TcpStream::connect(proxy)).unwrap();
    let url = url(Family::V4, path);
    write!(connection, "GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    connection.read_to_string(&mut reply).unwrap();
    reply.lines().next().unwrap_or_default().to_owned()
}

/// A URL on the server.
fn url(family: Family, path: &str) -> String {
    format!("http://{}{path}", SERVER.port(family, PORT))
}

#[test]
#[ignore = "root"]
fn connect_is_spliced() {
    let mut scene = Scene::new(&[]);
    let bytes = scene.file("root/slow/file", SIZE);
    for (n, (proxy, server)) in
        [(Family::V4, Family::V4), (Family::V6, Family::V6), (Family::V4, Family::V6)].into_iter().enumerate()
    {
        let output = format!("download-{n}");
        scene.curl(proxy, &["--proxytunnel", "--fail", "--output", &output, &url(server, "/slow/file")]);
        scene.same(&output, &bytes);
    }
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(records.len(), 3, "{records:#?}");
    for record in &records {
        assert_eq!((&record["how"], &record["listener"]), (&"closed".into(), &"http".into()), "{record}");
        let [all, spliced] = ["bytes_down", "spliced_down"].map(|key| record[key].as_u64().unwrap());
        assert!(all >= SIZE as u64 && spliced >= all / 2 && record["splices"] == 1, "{record}");
    }
}

#[test]
#[ignore = "root"]
fn connections_that_are_over_leave_no_entries() {
    const FLOWS: usize = 512;
    let mut scene = Scene::new(&["--max-flows", &FLOWS.to_string()]);
    let bytes = scene.file("root/slow/file", 10_000_000);
    for _ in 0..3 {
        for _ in 0..FLOWS / 2 {
            assert_eq!(ask(&scene, "/echo"), "HTTP/1.1 200 OK");
        }
        // A slot in the table of path entries rests for two seconds before it is reused.
        thread::sleep(Duration::from_millis(2500));
    }
    // If the old entries were left, there would be no slots for this connection.
    scene.curl(Family::V4, &["--proxytunnel", "--fail", "--output", "file", &url(Family::V4, "/slow/file")]);
    scene.same("file", &bytes);
    let counters = scene.proxy.counters();
    assert_eq!(counters["verdicts"]["table-full"], 0, "{counters}");
    assert_eq!(scene.proxy.end(&scene.pins).pop().unwrap()["splices"], 1);
}

#[test]
#[ignore = "root"]
fn several_servers_as_one_site() {
    let [four, six] = Family::BOTH.map(|family| SERVER.port(family, PORT));
    let site = FORWARDER_TO_CLIENT.port(Family::V4, SITE);
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("longsplice.toml");
    let text = format!(
        "[[listener]]\nprotocol = \"http\"\nlisten = \"{site}\"\nforwarded = \"x-forwarded-for\"\n\
         rules = [{{ action = \"deny\", path = \"/put*\", methods = \"DELETE\" }}]\n\
         [[listener.route]]\nhost = \"other.example\"\npool = \"half\"\n[[listener.route]]\npath = \"/\"\npool = \"web\"\n\
         [pool.web]\nservers = [\"{four}\", \"{six}\"]\ncheck = {{ path = \"/where\", interval = 0.1 }}\n\
         [pool.half]\nservers = [\"{}:1\", \"{four}\"]\nfailures = 1\nout = 3600\n",
        SERVER.v4
    );
    fs::write(&config, text).unwrap();
    let mut scene = Scene::new(&["--config", config.to_str().unwrap()]);
    let large = scene.file("root/large", SIZE);
    let direct = |arguments: &[&str]| scene.curl(Family::V4, &[&["--noproxy", "*", "--fail"], arguments].concat());
    let at = |path: &str| format!("http://{site}{path}");

    // One client connection that uses both servers in turn; then another client over the same server connections.
    let place = at("/where");
    let client = CLIENT.v4;
    let want = [SERVER.v4.to_string(), SERVER.v6.to_string()].map(|own| format!("{own} {site} {client}\n"));
    let both = [want.clone(), want].concat();
    let said = direct(&[&place, &place, &place, &place]);
    assert!(said == both.concat() || said == [&both[1..], &both[..1]].concat().concat(), "{said}");

    direct(&["--output", "download", &at("/large")]);
    scene.same("download", &large);
    direct(&["--upload-file", "root/large", &at("/put/upload")]);
    scene.same("root/put/upload", &large);
    let code = ["--noproxy", "*", "--output", "/dev/null", "--write-out", "%{http_code}\n"];
    let said = scene.curl(Family::V4, &[&code[..], &["--request", "DELETE", &at("/put/upload")]].concat());
    assert_eq!(said, "403\n");
    // A missing server costs one request a retry, but no reply is lost.
    let other = ["--header", "Host: other.example", &place];
    for _ in 0..3 {
        assert_eq!(direct(&other), format!("{} other.example {client}\n", SERVER.v4));
    }
    let counters = scene.proxy.counters();
    let proxy = &counters["proxy"];
    assert_eq!((&proxy["retries"], &proxy["servers_down"]), (&1.into(), &1.into()), "{counters}");
    assert!(proxy["reused"].as_u64() >= Some(3), "{counters}");
    let records = scene.proxy.end(&scene.pins);
    let routes: Vec<_> = records.iter().map(|r| r["route"].as_str().unwrap()).collect();
    assert_eq!(routes, [["2:web"; 7].as_slice(), &["1:half"; 3]].concat());
}

#[test]
#[ignore = "root"]
fn requests_in_absolute_form() {
    let mut scene = Scene::new(&[]);
    let large = scene.file("root/large", SIZE);
    let text = "0123456789\n".repeat(50_000);
    fs::write(scene.path("root/zip/text"), &text).unwrap();
    let [four, six] = Family::BOTH;
    let code = ["--write-out", "%{http_code} %{num_connects} %{size_download}\n", "--output", "/dev/null"];

    let said = scene.curl(four, &[&url(four, "/echo?a=b")]);
    assert_eq!(said, format!("GET /echo?a=b {} 1.1 longsplice\n", SERVER.port(four, PORT)));

    // Several requests on one client connection, to two addresses of the server: found and not found, large and small.
    let echo = url(four, "/echo");
    let mut many = Vec::new();
    for address in [url(four, "/large"), echo.clone(), url(six, "/echo"), url(four, "/nothing"), url(six, "/large")] {
        many.extend(code.map(String::from));
        many.push(address);
    }
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let said = scene.curl(six, &many);
    let codes: Vec<_> = said.lines().map(|l| l.split(' ').collect::<Vec<_>>()).collect();
    assert_eq!(codes.iter().map(|c| c[0]).collect::<Vec<_>>(), ["200", "200", "200", "404", "200"], "{said}");
    assert_eq!(codes.iter().map(|c| c[1]).collect::<Vec<_>>(), ["1", "0", "0", "0", "0"], "{said}");
    assert_eq!((codes[0][2], codes[4][2]), (SIZE.to_string().as_str(), SIZE.to_string().as_str()));

    scene.curl(four, &["--fail", "--output", "large", &url(four, "/large")]);
    scene.same("large", &large);
    scene.curl(four, &["--fail", "--compressed", "--output", "text", &url(four, "/zip/text"), "--dump-header", "head"]);
    scene.same("text", text.as_bytes());
    assert!(fs::read_to_string(scene.path("head")).unwrap().contains("Transfer-Encoding: chunked"));
    scene.curl(four, &["--fail", "--http1.0", "--compressed", "--output", "old", &url(four, "/zip/text")]);
    scene.same("old", text.as_bytes());
    let head = scene.curl(four, &["--head", &url(four, "/large"), &echo]);
    assert!(head.contains(&format!("Content-Length: {SIZE}")) && head.matches("200 OK").count() == 2, "{head}");

    // Uploads with a length and 100-continue, and in chunks.
    for (target, more) in [("/put/whole", &[][..]), ("/put/chunks", &["--header", "Transfer-Encoding: chunked"])] {
        let address = url(four, target);
        scene.curl(four, &[&["--fail", "--upload-file", "root/large", &address], more].concat());
        scene.same(&format!("root{target}"), &large);
    }
    let said = scene.curl(four, &[&code[..], &["--data", "x", &url(four, "/large")]].concat());
    assert!(said.starts_with("405 "), "{said}");
    // A destination that is blocked by default, and one that does not exist.
    let said = scene.curl(four, &[&code[..], &["http://127.0.0.1:1/"]].concat());
    assert!(said.starts_with("403 "), "{said}");
    let said = scene.curl(four, &[&code[..], &["http://169.254.169.254/latest"]].concat());
    assert!(said.starts_with("403 "), "{said}");
    let said = scene.curl(four, &[&code[..], &[&format!("http://{}:1/", SERVER.v4)]].concat());
    assert!(said.starts_with("502 "), "{said}");

    let counters = scene.proxy.counters();
    assert!(counters["proxy"]["reused"].as_u64() >= Some(1), "{counters}");
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(counters["proxy"]["requests"].as_u64(), Some(records.len() as u64));
    let large = |r: &&Value| r["method"] == "GET" && r["bytes_down"].as_u64() > Some(SIZE as u64);
    let (spliced, copied): (Vec<_>, Vec<_>) = records.iter().partition(|r| r["splices"].as_u64() > Some(0));
    assert!(spliced.iter().filter(|r| large(r)).count() >= 2, "{records:#?}");
    assert!(!copied.iter().any(large), "what is long is spliced: {records:#?}");
    assert_eq!(copied.iter().filter(|r| r["refusal"] == "short").count(), copied.len() - 3, "{records:#?}");
}
