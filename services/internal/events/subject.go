package events

import "strings"

// SubjectPrefix begins the subject of every event.
const SubjectPrefix = "crisp.v1"

// Subject returns where an event is published: the topic "/tasks/exit" of namespace
// "k8s.io" on node "n1" has the subject "crisp.v1.n1.k8s_io.tasks.exit". Characters
// that mean something in subjects are written as "_".
func Subject(node, namespace, topic string) string {
	return strings.Join([]string{SubjectPrefix, token(node), token(namespace), topicSubject(topic)}, ".")
}

// Topic returns the topic of a subject made by Subject, "" if it is none.
func Topic(subject string) string {
	rest, ok := strings.CutPrefix(subject, SubjectPrefix+".")
	if !ok {
		return ""
	}
	parts := strings.SplitN(rest, ".", 3)
	if len(parts) < 3 {
		return ""
	}
	return "/" + strings.ReplaceAll(parts[2], ".", "/")
}

// filterSubject returns the subject filter for a topic, in either notation. A last
// element ">" stands for everything below. An empty node stands for all nodes.
func filterSubject(node, topic string) string {
	where := "*"
	if node != "" {
		where = token(node)
	}
	trimmed := strings.Trim(strings.ReplaceAll(topic, "/", "."), ".")
	parts := strings.Split(trimmed, ".")
	for i, p := range parts {
		if p != "*" && (p != ">" || i != len(parts)-1) {
			parts[i] = token(p)
		}
	}
	return strings.Join([]string{SubjectPrefix, where, "*", strings.Join(parts, ".")}, ".")
}

func topicSubject(topic string) string {
	parts := strings.Split(strings.Trim(topic, "/"), "/")
	for i, p := range parts {
		parts[i] = token(p)
	}
	return strings.Join(parts, ".")
}

// token makes one element of a subject. It is also a valid part of a consumer's name.
func token(s string) string {
	if s == "" {
		return "_"
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
			return r
		}
		return '_'
	}, s)
}
