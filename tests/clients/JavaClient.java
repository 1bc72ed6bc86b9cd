// java.net.http.HttpClient in both protocol versions. Usage: java JavaClient.java URL
// Cases and output: as python_clients.py.
import java.net.URI;
import java.net.http.*;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.*;
import java.util.regex.*;

class JavaClient {
    static final String SUM = user("What is 17 + 25?"), STORY = user("Tell a long story about a river.");
    static final String SCHEMA = "{'type':'object','properties':{'city':{'enum':['Paris','London']}},'required':['city']}";
    static final Map<String, String> CASES = new LinkedHashMap<>();
    static HttpClient client;
    static String url;

    static String user(String content) {
        return "{'role':'user','content':'" + content + "'}";
    }

    static <T> T ask(String fields, HttpResponse.BodyHandler<T> handler) throws Exception {
        var body = HttpRequest.BodyPublishers.ofString(("{'temperature':0," + fields + "}").replace('\'', '"'));
        var request = HttpRequest.newBuilder(URI.create(url + "/v1/chat/completions")).POST(body);
        return client.send(request.header("Content-Type", "application/json").build(), handler).body();
    }

    static String found(String pattern, String text) {
        return String.join("", Pattern.compile(pattern, Pattern.MULTILINE).matcher(text).results().map(m -> m.group(1)).toList());
    }

    static String cancelled() throws Exception {
        var got = client.send(HttpRequest.newBuilder(URI.create(url + "/metrics")).build(), BodyHandlers.ofString());
        return found("^tridecode:requests_total\\{[^}]*\"cancelled\"[^}]*\\} (\\S+)$", got.body());
    }

    static String answer(String name, String fields) throws Exception {
        if (!name.equals("cancel")) {
            var got = ask(fields, BodyHandlers.ofString());
            return name.equals("stream") ? found("\"content\":\"([^\"]*)\"", got) : got;
        }
        var before = cancelled();
        try (var stream = ask(fields, BodyHandlers.ofInputStream())) {
            stream.readNBytes(300);
        }
        for (int i = 0; i < 100 && cancelled().equals(before); i++) Thread.sleep(50);
        return cancelled().equals(before) ? "" : "cancelled";
    }

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        String chat = "'model':'bundled','messages':[", sum = chat + SUM + "]";
        CASES.put("plain", sum);
        CASES.put("stream", sum + ",'stream':true");
        CASES.put("system", chat + "{'role':'system','content':'Your name is Otto.'}," + user("What is your name?") + "]");
        CASES.put("turns", chat + user("My name is Ada.") + ",{'role':'assistant','content':'Hello Ada!'},"
            + user("What is my name?") + "]");
        CASES.put("call", sum + ",'tool_choice':'required','tools':[{'type':'function','function':{'name':'get_weather',"
            + "'parameters':" + SCHEMA + "}}]");
        CASES.put("schema", sum + ",'response_format':{'type':'json_schema','json_schema':{'name':'city','schema':" + SCHEMA + "}}");
        CASES.put("error", sum.replace("bundled", "other"));
        CASES.put("cancel", chat + STORY + "],'stream':true");
        for (var version : HttpClient.Version.values()) {
            client = HttpClient.newBuilder().version(version).build();
            for (var each : CASES.entrySet()) {
                var got = answer(each.getKey(), each.getValue()).replace("\\", "\\\\").replace("\"", "\\\"");
                System.out.printf("[\"java.net.http, %s\", \"%s\", \"%s\", \"%s\"]%n", version,
                    System.getProperty("java.version"), each.getKey(), got.replace("\n", " "));
            }
        }
    }
}
