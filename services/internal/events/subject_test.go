package events

import "testing"

func TestSubject(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ node, namespace, topic, want string }{
		{"n1", "k8s.io", "/tasks/exit", "crisp.v1.n1.k8s_io.tasks.exit"},
		{"node.example.com", "moby", "/crisp/gap", "crisp.v1.node_example_com.moby.crisp.gap"},
		{"a*b>c d", "", "/images/a.b", "crisp.v1.a_b_c_d._.images.a_b"},
		{"nöde", "x", "tasks/start", "crisp.v1.n_de.x.tasks.start"},
	} {
		if got := Subject(tc.node, tc.namespace, tc.topic); got != tc.want {
			t.Errorf("got %s, want %s", got, tc.want)
		}
	}
	if got := Topic("crisp.v1.n1.k8s_io.tasks.exit"); got != "/tasks/exit" {
		t.Errorf("topic is %q", got)
	}
	for _, other := range []string{"other.subject", "crisp.v1.n1.k8s_io", "crisp.v2.a.b.c"} {
		if got := Topic(other); got != "" {
			t.Errorf("topic of %s is %q", other, got)
		}
	}
}

func TestFilterSubject(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ node, topic, want string }{
		{"n.1", "/tasks/exit", "crisp.v1.n_1.*.tasks.exit"},
		{"", "tasks.exit", "crisp.v1.*.*.tasks.exit"},
		{"", "/tasks/>", "crisp.v1.*.*.tasks.>"},
		{"", ">", "crisp.v1.*.*.>"},
		{"", "/tasks/*", "crisp.v1.*.*.tasks.*"},
		{"", "tasks.>.exit", "crisp.v1.*.*.tasks._.exit"},
	} {
		if got := filterSubject(tc.node, tc.topic); got != tc.want {
			t.Errorf("%s: got %s, want %s", tc.topic, got, tc.want)
		}
	}
}

func TestCarrierKeepsLowerCase(t *testing.T) {
	t.Parallel()
	c := headerCarrier{}
	c.Set("traceparent", "x")
	if _, ok := c["traceparent"]; !ok || c.Get("traceparent") != "x" || len(c.Keys()) != 1 {
		t.Errorf("carrier is %v", c)
	}
}

func TestRedeliveryGrows(t *testing.T) {
	t.Parallel()
	last := redelivery(1)
	for n := uint64(2); n < 100; n++ {
		d := redelivery(n)
		if d < last || d > maxRedelivery {
			t.Fatalf("delivery %d comes after %v, the one before after %v", n, d, last)
		}
		last = d
	}
	if redelivery(0) != minRedelivery || last != maxRedelivery {
		t.Errorf("limits are %v and %v", redelivery(0), last)
	}
}
